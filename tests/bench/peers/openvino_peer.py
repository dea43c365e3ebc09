"""OpenVINO GenAI on the GGUF file, in batches of as many prompts as there are streams."""

from importlib import metadata
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from talk import serve

CACHE_GIGABYTES = 1


class OpenVino:
    """A pipeline; the limit is looked at between batches alone, since a batch cannot be stopped."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = metadata.version("openvino-genai")
        if not settings["gguf"]:
            raise RuntimeError("needs a GGUF file")
        self._stop_ids = settings["stop_ids"]
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = settings["max_streams"]
        scheduler.cache_size = CACHE_GIGABYTES
        self._pipeline = genai.LLMPipeline(
            settings["gguf"],
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_NUM_THREADS=settings["num_threads"],
        )

    def generate(
        self, prompts: list[list[int]], num_streams: int, max_new_tokens: int, limit_seconds: float
    ) -> list[list[int]]:
        answers: list[list[int]] = []
        deadline = perf_counter() + limit_seconds
        for start in range(0, len(prompts), num_streams):
            if perf_counter() > deadline:
                break
            answers += self._batch(prompts[start : start + num_streams], max_new_tokens)
        return answers

    def first_token(self, prompt: list[int]) -> None:
        self._batch([prompt], 1)

    def _batch(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), self._stop_ids[0], dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = max_new_tokens, False
        config.stop_token_ids = set(self._stop_ids)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        return [list(tokens) for tokens in self._pipeline.generate(inputs, config).tokens]


if __name__ == "__main__":
    serve(OpenVino)
