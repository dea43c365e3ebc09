"""What quantisation costs: the perplexity of a text with float32 weights, packed ones, and rounded inputs.

Measured through the engine's own prompt log-probabilities, so it is what a server computes.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.progress import track

from headway.engine.build import build_engine, resolve_team
from headway.engine.config import EngineConfig, Quantize
from headway.engine.engine import Engine
from headway.engine.errors import UsageError
from headway.engine.kv_cache import block_bytes
from headway.engine.models.attention import ATTENTION
from headway.engine.models.load import LoadedModel, load_model
from headway.engine.models.tokenizer import load_tokenizer
from headway.engine.request import Request, StoppingParams
from headway.kernels.choices import Activations
from headway.kernels.cpu.library import Team


@dataclass(frozen=True, slots=True)
class Perplexity:
    """One row of the report."""

    weights: Literal["float32", "packed"]
    activations: Activations
    perplexity: float


@dataclass(frozen=True, slots=True)
class Report:
    """The float32 row comes first; the others are compared with it."""

    perplexities: tuple[Perplexity, ...]
    num_tokens: int
    window_tokens: int
    stride_tokens: int


_WAYS: tuple[tuple[Literal["float32", "packed"], Activations], ...] = (
    ("float32", "fp32"),
    ("packed", "fp32"),
    ("packed", "int8"),
)


@dataclass(frozen=True, slots=True)
class Window:
    """A run of tokens that the model sees, of which the last `num_counted` count."""

    token_ids: tuple[int, ...]
    num_counted: int


def measure(
    model: str,
    quantize: Quantize,
    text: str,
    window_tokens: int,
    stride_tokens: int,
    config: EngineConfig,
    console: Console,
) -> Report:
    """Load the model in each way, one after another, and measure the text.

    Float weights run in torch, packed ones in the kernels that `config` names.

    Raises:
        UsageError: the text is too short, or the windows too long for the model.
        ModelLoadError: the model cannot be loaded, or not in float32.
    """
    config = replace(config, device="cpu", dtype="float32", prefix_cache=False, max_draft_tokens=0)
    team = resolve_team(config)
    rows: list[Perplexity] = []
    num_counted = 0
    for weights, activations in _WAYS:
        is_packed = weights == "packed"
        loaded = load_model(
            model,
            attention=ATTENTION,
            quantize=quantize if is_packed else "none",
            activations=activations,
            keep_packed=is_packed,
        )
        windows = list(cut(*_tokenize(loaded, text), window_tokens, stride_tokens))
        num_counted = sum(window.num_counted for window in windows)
        if not num_counted:
            raise UsageError("the text has fewer than two tokens; some ten thousand tell much")
        engine = _make_engine(loaded, config, window_tokens, team if is_packed else None)
        shown = track(windows, f"{weights}, {activations}", console=console)
        total = sum(log_probability(engine, window) for window in shown)
        rows.append(Perplexity(weights, activations, math.exp(-total / num_counted)))
    if team is not None:
        team.close()
    return Report(tuple(rows), num_counted, window_tokens, stride_tokens)


def cut(
    start_ids: Seq[int], token_ids: Seq[int], window_tokens: int, stride_tokens: int
) -> Iterator[Window]:
    """Cut a text into windows, each behind `start_ids`; every token but the first counts once.

    Example, no start_ids, 6 tokens, windows of 4, a stride of 2: 0-3, of which 1, 2, 3 count; then
    2-5, of which 4 and 5 count, with two tokens or more before each.
    """
    room = window_tokens - len(start_ids)
    done = 0 if start_ids else 1
    first = 0
    while done < len(token_ids):
        last = min(first + room, len(token_ids))
        yield Window((*start_ids, *token_ids[first:last]), last - done)
        done, first = last, first + min(stride_tokens, room)


def log_probability(engine: Engine, window: Window) -> float:
    """Return the sum of log p over the counted tokens of a window."""
    request = Request(
        "window",
        window.token_ids,
        StoppingParams(0),
        num_prompt_logprobs=0,
        use_prefix_cache=False,
    )
    engine.add(request)
    scores: list[float] = []
    while engine.has_work:
        for output in engine.step():
            scores += [each.logprob for each in output.prompt_logprobs]
    return math.fsum(scores[-window.num_counted :])


def _tokenize(loaded: LoadedModel, text: str) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before every text, and the text's tokens."""
    tokenizer: Any = load_tokenizer(loaded.path)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    start = [tokenizer.bos_token_id]
    begins = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == start
    return (start if begins else []), ids


def _make_engine(
    loaded: LoadedModel, config: EngineConfig, window_tokens: int, team: Team | None
) -> Engine:
    """Make an engine with a cache for one window."""
    num_blocks = -(-window_tokens // config.block_size) + 2
    one = block_bytes(loaded.config, config.block_size, loaded.model.dtype)
    config = replace(config, kv_cache_bytes=num_blocks * one)
    engine = build_engine(loaded.model, loaded.eos_token_ids, config, team=team)
    if window_tokens > engine.limits.max_context_tokens:
        raise UsageError(
            f"window_tokens is {window_tokens}; the model's context has "
            f"{engine.limits.max_context_tokens} tokens"
        )
    return engine
