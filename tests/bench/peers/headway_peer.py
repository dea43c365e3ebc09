"""Headway's engine, without gRPC, as the other peers are without their servers. Tokenises for all of them."""

import itertools
from collections import deque
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

from talk import serve

from headway.engine.config import EngineConfig
from headway.engine.models.convert import convert_gguf
from headway.engine.models.store import resolve
from headway.engine.request import FinishReason, Request, SamplingParams, StoppingParams
from headway.protos import text_generation_pb2 as pb
from headway.server.assembly import ModelSettings, assemble, make_engine
from headway.server.prompt import read_prompt


class Headway:
    """One engine; its settings are the defaults but for the bounds that every peer gets."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = metadata.version("headway") if _is_installed() else "this tree"
        model = ModelSettings(
            model=settings["name"],
            speculation=settings["speculation"],
            heads=Path(settings["heads"]) if settings.get("heads") else None,
            engine=EngineConfig(
                num_threads=settings["num_threads"],
                max_context_tokens=settings["max_context_tokens"],
                max_running_requests=settings["max_streams"],
            ),
        )
        self._assembled = assemble(model)
        self._engine = make_engine(self._assembled)
        self._ids = map(str, itertools.count())

    def describe(self) -> dict[str, Any]:
        """Say where the weights are, for those who read the file or the converted folder."""
        path = resolve(self._assembled.loaded.name)
        return {
            "gguf": str(path) if path.is_file() else "",
            "folder": str(convert_gguf(path) if path.is_file() else path),
            "stop_ids": list(self._assembled.loaded.eos_token_ids),
        }

    def tokenize(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Return the token ids of chats of one user message each, or of plain texts."""
        tokenizer = self._assembled.tokenizer
        found = []
        for text in texts:
            message = pb.GenerateRequest()
            if tokenizer.chat_template is None:
                message.text = text
            else:
                message.chat.messages.add(role="user", content=text)
            found.append(read_prompt(tokenizer, message))
        return found

    def generate(
        self, prompts: list[list[int]], num_streams: int, max_new_tokens: int, limit_seconds: float
    ) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = deque(zip(prompts, answers, strict=True))
        live: dict[str, list[int]] = {}
        deadline = perf_counter() + limit_seconds
        while (waiting or live) and perf_counter() < deadline:
            while waiting and len(live) < num_streams:
                prompt, answer = waiting.popleft()
                key = next(self._ids)
                live[key] = answer
                self._engine.add(
                    Request(
                        request_id=key,
                        prompt_ids=tuple(prompt),
                        sampling=SamplingParams(temperature=0.0),
                        stopping=StoppingParams(max_new_tokens),
                        use_prefix_cache=False,
                    )
                )
            for output in self._engine.step():
                live[output.request_id] += output.token_ids
                if output.finish is not None:
                    del live[output.request_id]
        for key in live:
            self._engine.abort(key, FinishReason.CANCELLED)
        return answers

    def first_token(self, prompt: list[int]) -> None:
        self.generate([prompt], 1, 1, 1e9)


def _is_installed() -> bool:
    return any(found.name == "headway" for found in metadata.distributions(name="headway"))


if __name__ == "__main__":
    serve(Headway)
