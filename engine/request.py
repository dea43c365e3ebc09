"""What crosses the engine's door: Request in, Output out. All frozen, all plain data.

Token ids only; text, protobuf and stop strings are the server's business.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class FinishReason(StrEnum):
    """Why a request ended; the value is the metric label and, in capitals, the proto name."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The law that each next token is drawn from. engine/logits.py applies it in field order.

    Penalties count tokens of the prompt and the answer (repetition) or of the answer alone
    (presence, frequency).
    """

    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be generated; empty allows every token."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token runs that may not appear in the answer."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id among equals."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    """64 bits; the token at a position depends on (seed, position) and the law alone."""


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When the answer ends. Stop strings are found by the server, which then aborts."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Before this many tokens no end-of-sequence or stop token can be drawn."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Whether drafts may be proposed for this request. They change its speed, never its tokens."""

    enabled: bool = True
    max_draft_tokens: int | None = None
    """At most this many drafted nodes a step; None leaves it to the engine."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be continued."""

    request_id: str
    prompt_ids: tuple[int, ...]
    stopping: StoppingParams
    sampling: SamplingParams = SamplingParams()
    speculation: SpeculationParams = SpeculationParams()
    num_logprobs: int | None = None
    """For each generated token, how many likeliest alternatives to report; None reports nothing."""
    num_prompt_logprobs: int | None = None
    """The same for each prompt token but the first. The prompt is then computed in full."""
    priority: int = 0
    """Lower runs first; equal ones in order of arrival."""
    cache_salt: str = ""
    """Prefixes are shared only between requests with the same salt."""
    use_prefix_cache: bool = True
    deadline: float | None = None
    """time.monotonic() after which the request ends with DEADLINE."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """log p of one token under the model itself, before penalties, temperature and filters."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest (token id, logprob), best first."""


def tau(num_emitted: int, num_steps: int) -> float:
    """Mean tokens per pass of the model, the bonus token included; plain decoding is 1.00.

    NaN where there was no pass.
    """
    return num_emitted / num_steps if num_steps else math.nan


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one request."""

    num_steps: int = 0
    """Passes of the model that emitted tokens for this request."""
    num_drafted: int = 0
    """Tree nodes that were verified, roots not counted."""
    num_accepted: int = 0
    """Drafted tokens that entered the answer."""
    num_emitted: int = 0
    """Tokens that entered the answer."""
    accepted_per_position: tuple[int, ...] = ()
    """[i] counts the steps whose accepted run was longer than i."""

    @property
    def tau(self) -> float:
        return tau(self.num_emitted, self.num_steps)


@dataclass(frozen=True, slots=True)
class Timing:
    """time.monotonic() of a request's turning points; 0.0 has not happened."""

    arrived: float
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request."""

    reason: FinishReason
    stop_token_id: int | None = None
    message: str = ""
    """For ERROR: what went wrong, in one line."""
    speculation: SpeculationStats = SpeculationStats()


@dataclass(frozen=True, slots=True)
class Output:
    """What one step did for one request. The last one of a request carries `finish`."""

    request_id: str
    timing: Timing
    token_ids: tuple[int, ...] = ()
    """New tokens: accepted drafts and the bonus token. Empty while a prompt is computed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each new token when the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt positions computed in this step; the pieces follow each other in order."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    finish: Finish | None = None
