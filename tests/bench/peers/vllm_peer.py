"""vLLM's engine in this process, on the converted folder; requests join and leave its batch."""

import itertools
from collections import deque
from time import perf_counter
from typing import Any

import vllm
from talk import serve
from vllm import LLM, SamplingParams


class Vllm:
    """An engine in one dtype, without prefix cache."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = vllm.__version__
        self._stop_ids = settings["stop_ids"]
        self._engine = LLM(
            model=settings["folder"],
            dtype=settings["dtype"],
            max_model_len=settings["max_context_tokens"],
            max_num_seqs=settings["max_streams"],
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._ids = map(str, itertools.count())

    def generate(
        self, prompts: list[list[int]], num_streams: int, max_new_tokens: int, limit_seconds: float
    ) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            stop_token_ids=self._stop_ids,
            detokenize=False,
        )
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = deque(range(len(prompts)))
        live: dict[str, int] = {}
        deadline = perf_counter() + limit_seconds
        while (waiting or live) and perf_counter() < deadline:
            while waiting and len(live) < num_streams:
                index, key = waiting.popleft(), next(self._ids)
                live[key] = index
                self._engine.add_request(key, {"prompt_token_ids": prompts[index]}, params)
            for output in self._engine.step():
                answers[live[output.request_id]] = list(output.outputs[0].token_ids)
                if output.finished:
                    del live[output.request_id]
        self._engine.abort_request(list(live))
        return answers

    def first_token(self, prompt: list[int]) -> None:
        self.generate([prompt], 1, 1, 1e9)


if __name__ == "__main__":
    serve(Vllm)
