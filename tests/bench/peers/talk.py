"""How a peer talks to peers.py: one JSON object a line in, one out. Imports nothing that is not Python's.

A peer has the methods of `Peer`. What a library prints goes to stderr, so that stdout holds answers alone.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol


class Peer(Protocol):
    """An engine under test. All prompts are token ids; all sampling is greedy."""

    version: str

    def generate(
        self, prompts: list[list[int]], num_streams: int, max_new_tokens: int, limit_seconds: float
    ) -> list[list[int]]:
        """Answer the prompts, `num_streams` at a time, until a stop token or the limit; return the ids."""

    def first_token(self, prompt: list[int]) -> None:
        """Compute a prompt's first new token, with nothing kept from earlier prompts."""


def serve(load: Callable[[dict[str, Any]], Peer]) -> None:
    """Load what the first line asks for, then answer until stdin ends.

    Example: {"do": "first_token", "prompt": [1, 2, 3]} is answered by {"seconds": 0.031}.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    bytes_before = rss_bytes("VmRSS")
    peer = load(json.loads(sys.stdin.readline()))
    print(json.dumps({"version": peer.version}), file=answers)
    for line in sys.stdin:
        answer = _answer(peer, json.loads(line), bytes_before)
        print(json.dumps(answer), file=answers)


def rss_bytes(field: str) -> int:
    """Return VmRSS, resident now, or VmHWM, its peak; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _answer(peer: Peer, request: dict[str, Any], bytes_before: int) -> dict[str, Any]:
    kind = request.pop("do")
    started = perf_counter()
    if kind == "generate":
        token_ids = peer.generate(**request)
        return {"seconds": perf_counter() - started, "token_ids": token_ids}
    if kind == "first_token":
        peer.first_token(**request)
        return {"seconds": perf_counter() - started}
    if kind == "memory":
        return {"bytes": rss_bytes("VmHWM") - bytes_before}
    # What only one peer can do, such as the tokens of a text, is asked of it by name.
    return {kind: getattr(peer, kind)(**request)}
