"""check_request: every limit on a request in one table, each with a message that says what to do.

What passes here is safe to run; the engine checks nothing again.
"""

import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass

from headway.engine.config import MAX_NODES
from headway.engine.errors import InvalidRequest, Violation
from headway.engine.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine can serve. The counts bound the work that one request may cause."""

    vocab_size: int
    max_context_tokens: int
    """Prompt plus answer, as the model allows it."""
    max_cache_tokens: int
    """Tokens that the whole KV cache can hold."""
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_allowed_token_ids: int = 16_384
    max_bad_words: int = 256
    max_bad_word_tokens: int = 64
    max_stop_token_ids: int = 256
    max_cache_salt_length: int = 256


def check_request(request: Request, limits: Limits) -> None:
    """Raise InvalidRequest with a violation for every bad field, if there is one.

    More new tokens than the context has room for are no error: the answer ends there with LENGTH.
    """
    violations = [
        *_check_prompt(request, limits),
        *_check_numbers(request, limits),
        *_check_sizes(request, limits),
        *_check_token_ids(request, limits),
        *_check_values(request.sampling),
    ]
    if violations:
        raise InvalidRequest(*violations)


def _check_prompt(request: Request, limits: Limits) -> Iterator[Violation]:
    """The prompt must fit with one new token after it, unless it is only to be scored."""
    num_tokens = len(request.prompt_ids)
    if num_tokens == 0:
        yield Violation(
            "prompt", "has no tokens; it needs at least 1. Send some text or token ids."
        )
    needed = num_tokens + (request.stopping.max_new_tokens != 0)
    if needed > limits.max_context_tokens:
        yield Violation(
            "prompt",
            f"has {num_tokens:,} tokens; with the answer's first it must fit the context of "
            f"{limits.max_context_tokens:,} (max_context_tokens). Shorten the prompt.",
        )
    elif needed > limits.max_cache_tokens:
        yield Violation(
            "prompt",
            f"has {num_tokens:,} tokens; with the answer's first it must fit the whole KV cache of "
            f"{limits.max_cache_tokens:,}. Shorten the prompt, or restart the server with a larger "
            "cache (kv_cache_bytes).",
        )


@dataclass(frozen=True, slots=True)
class _Range:
    """Numbers a field may hold; None is a field left out. NaN is in no range."""

    field: str
    value: float | None
    low: float
    high: float
    advice: str
    without_low: bool = False
    without_high: bool = False
    also: float | None = None
    """A single value that is allowed beside the range."""

    def violation(self) -> Violation | None:
        if self.value is None:
            return None
        above = self.value > self.low if self.without_low else self.value >= self.low
        below = self.value < self.high if self.without_high else self.value <= self.high
        if (above and below) or self.value == self.also:
            return None
        return Violation(
            self.field, f"is {self.value}; it must be {self._allowed()}. {self.advice}"
        )

    def _allowed(self) -> str:
        low = f"above {self.low:g}" if self.without_low else f"at least {self.low:,}"
        high = f"below {self.high:g}" if self.without_high else f"at most {self.high:,}"
        also = "" if self.also is None else f"{self.also:g}, or "
        return also + (low if math.isinf(self.high) else f"{low} and {high}")


def _check_numbers(request: Request, limits: Limits) -> Iterator[Violation]:
    if request.deadline is not None and not math.isfinite(request.deadline):
        yield Violation(
            "deadline",
            f"is {request.deadline}; it must be a finite time. Leave it out for no deadline.",
        )
    yield from filter(None, (range_.violation() for range_ in _ranges(request, limits)))


def _ranges(request: Request, limits: Limits) -> tuple[_Range, ...]:
    law, stopping, speculation = request.sampling, request.stopping, request.speculation
    most_new = max(stopping.max_new_tokens, 0)
    most_logprobs, most_drafts = limits.max_logprobs, MAX_NODES - 1
    every, off = "to keep every token.", "Leave it out to turn it off."
    no_top = "Use 0 for the chosen tokens alone."
    return (
        _Range("max_new_tokens", stopping.max_new_tokens, 0, math.inf, "0 only scores the prompt."),
        _Range(
            "min_new_tokens",
            stopping.min_new_tokens,
            0,
            most_new,
            "Lower it, or raise max_new_tokens.",
        ),
        _Range("temperature", law.temperature, 0.01, 100, "Use 0 for the likeliest token.", also=0),
        _Range("top_k", law.top_k, 0, math.inf, f"Use 0 {every}"),
        _Range("top_p", law.top_p, 0, 1, f"Use 1 {every}", without_low=True),
        _Range("min_p", law.min_p, 0, 1, f"Use 0 {every}", without_high=True),
        _Range("typical_p", law.typical_p, 0, 1, f"Use 1 {every}", without_low=True),
        _Range("repetition_penalty", law.repetition_penalty, 0, 10, off, without_low=True),
        _Range("presence_penalty", law.presence_penalty, -2, 2, off),
        _Range("frequency_penalty", law.frequency_penalty, -2, 2, off),
        _Range("seed", law.seed, 0, 2**64 - 1, "Leave it out to have one chosen."),
        _Range("priority", request.priority, -(2**31), 2**31 - 1, "Lower runs first; 0 is usual."),
        _Range("num_logprobs", request.num_logprobs, 0, most_logprobs, no_top),
        _Range("num_prompt_logprobs", request.num_prompt_logprobs, 0, most_logprobs, no_top),
        _Range(
            "max_draft_tokens",
            speculation.max_draft_tokens,
            0,
            most_drafts,
            "Leave it out to let the engine choose, use 0 for none.",
        ),
    )


def _check_sizes(request: Request, limits: Limits) -> Iterator[Violation]:
    sampling = request.sampling
    longest_bad_word = max(sampling.bad_words, key=len, default=())
    sizes: list[tuple[str, str, Sized, int]] = [
        ("logit_bias", "has {} entries", sampling.logit_bias, limits.max_logit_bias),
        (
            "allowed_token_ids",
            "has {} ids",
            sampling.allowed_token_ids,
            limits.max_allowed_token_ids,
        ),
        ("bad_words", "has {} entries", sampling.bad_words, limits.max_bad_words),
        ("bad_words", "has an entry of {} tokens", longest_bad_word, limits.max_bad_word_tokens),
        (
            "stop_token_ids",
            "has {} ids",
            request.stopping.stop_token_ids,
            limits.max_stop_token_ids,
        ),
        (
            "cache_salt",
            "has {} characters",
            request.cache_salt,
            limits.max_cache_salt_length,
        ),
    ]
    for field, given, value, limit in sizes:
        if len(value) > limit:
            message = (
                f"{given.format(f'{len(value):,}')}; at most {limit:,} are allowed. Send fewer."
            )
            yield Violation(field, message)
    if not all(sampling.bad_words):
        yield Violation(
            "bad_words",
            f"has an entry without tokens, at index {sampling.bad_words.index(())}; each must have "
            "at least 1. Remove it.",
        )


def _check_token_ids(request: Request, limits: Limits) -> Iterator[Violation]:
    sampling = request.sampling
    for field, ids in (
        ("prompt", request.prompt_ids),
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", [token_id for word in sampling.bad_words for token_id in word]),
        ("stop_token_ids", request.stopping.stop_token_ids),
    ):
        foreign = [token_id for token_id in ids if not 0 <= token_id < limits.vocab_size]
        if foreign:
            yield Violation(
                field,
                f"holds {len(foreign):,} token ids outside the vocabulary, the first {foreign[0]}; "
                f"ids go from 0 to {limits.vocab_size - 1:,}. Use this model's tokenizer.",
            )


def _check_values(sampling: SamplingParams) -> Iterator[Violation]:
    bad = {i: bias for i, bias in sampling.logit_bias.items() if not -100 <= bias <= 100}
    for token_id, bias in list(bad.items())[:1]:
        yield Violation(
            "logit_bias",
            f"is {bias} for token {token_id}; it must be from -100 to 100. "
            "Use bad_words to forbid a token.",
        )
