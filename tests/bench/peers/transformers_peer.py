"""transformers' own generate(), in batches of as many prompts as there are streams."""

from time import perf_counter
from typing import Any

import torch
import transformers
from talk import serve
from transformers import AutoModelForCausalLM, GenerationConfig, MaxTimeCriteria


class Transformers:
    """A model of the converted folder in one dtype."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = transformers.__version__
        torch.set_num_threads(settings["num_threads"])
        self._stop_ids = settings["stop_ids"]
        self._model = AutoModelForCausalLM.from_pretrained(
            settings["folder"], dtype=getattr(torch, settings["dtype"]), local_files_only=True
        )
        self._model.eval()

    def generate(
        self, prompts: list[list[int]], num_streams: int, max_new_tokens: int, limit_seconds: float
    ) -> list[list[int]]:
        answers: list[list[int]] = []
        deadline = perf_counter() + limit_seconds
        for start in range(0, len(prompts), num_streams):
            left = deadline - perf_counter()
            if left <= 0:
                break
            answers += self._batch(prompts[start : start + num_streams], max_new_tokens, left)
        return answers

    def first_token(self, prompt: list[int]) -> None:
        self._batch([prompt], 1, 1e9)

    @torch.inference_mode()
    def _batch(
        self, prompts: list[list[int]], max_new_tokens: int, limit_seconds: float
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        pad = self._stop_ids[0]
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=self._stop_ids,
                pad_token_id=pad,
            ),
            stopping_criteria=[MaxTimeCriteria(limit_seconds)],
        )
        return [self._cut(row) for row in output[:, width:].tolist()]

    def _cut(self, tokens: list[int]) -> list[int]:
        """Drop what fills a row after its end."""
        ends = [index for index, token in enumerate(tokens) if token in self._stop_ids]
        return tokens[: ends[0] + 1] if ends else tokens


if __name__ == "__main__":
    serve(Transformers)
