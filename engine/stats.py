"""Numbers about the engine: running totals, what one step took, and a snapshot for metrics."""

import time
from dataclasses import dataclass, field, replace
from typing import Literal

NO_DRAFTER = "off"
"""Stands for a drafter's name where nothing drafts."""

Undrafted = Literal["request", "load", "blocks", "cost"]
"""Why a sequence may not draft in a step: its request says so, the step's tokens are used up, the
cache has no free block, or drafts have cost more time than they saved."""


@dataclass(slots=True)
class EngineCounters:
    """Totals since start. The engine thread writes them, the metrics thread reads them."""

    prompt_computed_tokens: int = 0
    """Each prompt position counts once, here or in `prompt_cached_tokens`, however often a preemption
    has it computed again."""
    prompt_cached_tokens: int = 0
    generated_tokens: int = 0
    """Tokens appended to answers, those that a stop string or an abort makes useless included."""
    recomputed_tokens: int = 0
    """Computed once, dropped by preemption, computed again."""
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    spec_drafted_tokens: int = 0
    """Nodes verified, roots not counted."""
    spec_emitted_tokens: int = 0
    """Tokens emitted by passes with drafts, bonus tokens included."""
    spec_accepted_lengths: list[int] = field(default_factory=lambda: [0])
    """[k] counts the passes with drafts that accepted k of them. As long as the longest draft plus one.

    Example, at most 3 drafts: [4, 0, 2, 1] are 7 passes that accepted 2 * 2 + 3 = 7 drafts; 3 of them
    accepted the first, 3 the second and 1 the third.
    """
    spec_disabled: dict[Undrafted, int] = field(
        default_factory=lambda: {"request": 0, "load": 0, "blocks": 0, "cost": 0}
    )
    """Passes of one sequence in which the drafter was not asked, by reason."""

    @property
    def spec_steps(self) -> int:
        """Passes of one sequence with at least one drafted node."""
        return sum(self.spec_accepted_lengths)

    @property
    def spec_accepted_tokens(self) -> int:
        """Drafted tokens that entered answers."""
        return sum(length * num for length, num in enumerate(self.spec_accepted_lengths))

    @property
    def spec_accepted_per_position(self) -> tuple[int, ...]:
        """[i] counts the passes that accepted more than i drafts."""
        lengths = self.spec_accepted_lengths
        return tuple(sum(lengths[position + 1 :]) for position in range(len(lengths) - 1))

    def copy(self) -> "EngineCounters":
        """Copy, for a reader on another thread; what is derived from a list then agrees."""
        return replace(
            self,
            spec_accepted_lengths=list(self.spec_accepted_lengths),
            spec_disabled=dict(self.spec_disabled),
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step worked on and how long its phases took."""

    num_sequences: int
    num_tokens: int
    schedule_seconds: float
    draft_seconds: float
    model_seconds: float
    """The pass of the model over all rows, logits included."""
    accept_seconds: float
    commit_seconds: float

    @property
    def step_seconds(self) -> float:
        return self.overhead_seconds + self.model_seconds + self.draft_seconds

    @property
    def overhead_seconds(self) -> float:
        """Time outside the model and the drafter."""
        return self.schedule_seconds + self.accept_seconds + self.commit_seconds


class Stopwatch:
    """Adds up the time of a step's phases: each lap ends one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("schedule", "draft", "model", "accept", "commit"), 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: Literal["schedule", "draft", "model", "accept", "commit"]) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    @property
    def model_seconds(self) -> float:
        return self._seconds["model"]

    @property
    def draft_seconds(self) -> float:
        return self._seconds["draft"]

    @property
    def other_seconds(self) -> float:
        """Time outside the model and the drafter so far, the phase that has not ended included."""
        running = time.perf_counter() - self._last
        return sum(self._seconds.values()) + running - self.model_seconds - self.draft_seconds

    def record(self, num_sequences: int, num_tokens: int) -> StepRecord:
        seconds = {f"{phase}_seconds": value for phase, value in self._seconds.items()}
        return StepRecord(num_sequences, num_tokens, **seconds)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What stays as it is while an engine lives."""

    block_size: int
    cache_dtype: str
    """As torch says it, without its prefix: float32."""
    drafter: str
    """Its name, or NO_DRAFTER."""
    max_draft_tokens: int
    """Most nodes that are drafted for one sequence in one step."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's state at one moment."""

    num_running: int
    num_waiting: int
    num_queued_prompt_tokens: int
    num_blocks: int
    num_active_blocks: int
    num_cached_blocks: int
    num_evicted_blocks: int
    counters: EngineCounters
    info: EngineInfo
    step_seconds: tuple[tuple[int, float], ...] = ()
    """(rows, seconds) of a pass of the model, as drafts are chosen by; empty where none are."""
