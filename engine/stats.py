"""Numbers about the engine: running totals, what one step took, and a snapshot for metrics."""

import time
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class EngineCounters:
    """Totals since start. The engine thread writes them, the metrics thread reads them."""

    prompt_computed_tokens: int = 0
    prompt_cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    """Computed once, dropped by preemption, computed again."""
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    spec_steps: int = 0
    """Passes of one sequence with at least one drafted node."""
    spec_drafted_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_emitted_tokens: int = 0
    """Tokens emitted by those passes, bonus tokens included."""
    spec_accepted_per_position: list[int] = field(default_factory=list)


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

    def record(self, num_sequences: int, num_tokens: int) -> StepRecord:
        seconds = {f"{phase}_seconds": value for phase, value in self._seconds.items()}
        return StepRecord(num_sequences, num_tokens, **seconds)


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
