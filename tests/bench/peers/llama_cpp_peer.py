"""llama.cpp through llama-cpp-python's low-level calls: sequences join and leave one batch, as its server does."""

import ctypes
from collections import deque
from time import perf_counter
from typing import Any

import llama_cpp as lib
import numpy as np
from talk import serve

BATCH_TOKENS = 512


class LlamaCpp:
    """A context with room for `max_streams` sequences of `max_context_tokens` each.

    A cache for each sequence, llama.cpp's default, was faster than one for all at every batch size.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = lib.__version__
        if not settings["gguf"]:
            raise RuntimeError("needs a GGUF file")
        self._stop_ids = frozenset(settings["stop_ids"])
        lib.llama_backend_init()
        self._log = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._log, ctypes.c_void_p(0))
        model = lib.llama_load_model_from_file(
            settings["gguf"].encode(), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx = settings["max_context_tokens"] * settings["max_streams"]
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = settings["max_streams"]
        params.n_threads = params.n_threads_batch = settings["num_threads"]
        self._context = lib.llama_new_context_with_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {settings['gguf']}")
        self._num_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(
        self, prompts: list[list[int]], num_streams: int, max_new_tokens: int, limit_seconds: float
    ) -> list[list[int]]:
        lib.llama_memory_clear(self._memory, False)
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = deque(range(len(prompts)))
        free = list(range(num_streams))
        live: dict[int, int] = {}  # the sequence of a prompt
        deadline = perf_counter() + limit_seconds
        while (waiting or live) and perf_counter() < deadline:
            while waiting and free:
                # By itself: caches that are apart make llama.cpp cut a batch of unequal parts up.
                index = waiting.popleft()
                live[index] = free.pop()
                answers[index] = self._decode(_prompt_rows(prompts[index], live[index]))
            rows = [
                (answers[index][-1], len(prompts[index]) + len(answers[index]) - 1, sequence, True)
                for index, sequence in live.items()
            ]
            tokens = self._decode(rows)
            for index, token in zip(list(live), tokens, strict=True):
                answers[index].append(token)
                if token in self._stop_ids or len(answers[index]) == max_new_tokens:
                    sequence = live.pop(index)
                    lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
                    free.append(sequence)
        return answers

    def first_token(self, prompt: list[int]) -> None:
        lib.llama_memory_clear(self._memory, False)
        self._decode(_prompt_rows(prompt, 0))

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run rows of (token, position, sequence, whether its logits are wanted); arg-max of the wanted."""
        found = []
        for start in range(0, len(rows), BATCH_TOKENS):
            part = rows[start : start + BATCH_TOKENS]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, (token, position, sequence, is_wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, is_wanted
            status = lib.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            found += [self._argmax(i) for i, row in enumerate(part) if row[3]]
        return found

    def _argmax(self, row: int) -> int:
        logits = lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._num_vocab,)).argmax())


def _prompt_rows(prompt: list[int], sequence: int) -> list[tuple[int, int, int, bool]]:
    last = len(prompt) - 1
    return [(token, position, sequence, position == last) for position, token in enumerate(prompt)]


if __name__ == "__main__":
    serve(LlamaCpp)
