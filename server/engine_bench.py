"""Runs prompts through an Engine and measures its steps. Prints nothing; commands/bench.py shows it."""

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from time import perf_counter

from headway.engine.engine import Engine
from headway.engine.errors import UsageError
from headway.engine.request import Output, Request, SpeculationStats, StoppingParams, tau
from headway.engine.stats import StepRecord

PHASES = ("schedule", "draft", "model", "accept", "commit", "overhead", "step")
"""overhead is schedule + accept + commit: what is neither the model nor the drafter."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message and the kind of work that it asks for."""

    prompt: str
    category: str
    id: int | str | None = None
    """What the file calls it; nothing is done with it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Three percentiles of a number that was measured several times."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Sort out the percentiles, each a value that occurred; of nothing they are NaN."""
        if not values:
            return cls(math.nan, math.nan, math.nan)
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(*(ordered[round(last * share)] for share in (0.2, 0.5, 0.8)))


@dataclass(slots=True)
class Run:
    """What one pass over all prompts did."""

    seconds: float = 0.0
    token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By request id, as below."""
    speculation: dict[str, SpeculationStats] = field(default_factory=dict)
    decode_steps: list[StepRecord] = field(default_factory=list)
    """Steps in which no prompt was computed."""
    num_decoded: int = 0
    """Tokens that those steps emitted."""
    num_context_tokens: int = 0
    """Tokens before the ones that those steps computed, over all sequences and steps."""
    prompt_seconds: float = 0.0
    """Time of the steps in which some prompt was computed."""
    pass_seconds: Mapping[int, float] = field(default_factory=dict)
    """What a pass of the model over so many rows takes, as drafts were chosen by; else empty."""

    @property
    def num_new_tokens(self) -> int:
        return sum(map(len, self.token_ids.values()))

    @property
    def decode_seconds(self) -> float:
        return sum(step.step_seconds for step in self.decode_steps)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One way to speculate at one batch size."""

    speculation: str
    batch_size: int
    num_prompt_tokens: int
    num_new_tokens: int
    tokens_per_second: Spread
    """New tokens over the time of a whole run, prompts included; spread over the runs."""
    decode_tokens_per_second: Spread
    """New tokens of steps without prompts over the time of those steps; spread over the runs."""
    prompt_seconds: Spread
    """Time of the steps that computed prompts; spread over the runs."""
    step_ms: Mapping[str, Spread]
    """A step without prompts, by phase; spread over the steps of all runs."""
    pass_ms: Mapping[int, float]
    """A pass of the model by its rows, as drafts were chosen by in the last run; else empty."""
    rows_per_step: float
    """Mean rows of those steps: last tokens and drafts."""
    sequences_per_step: float
    context_per_sequence: float
    """Mean tokens that a sequence has in those steps."""
    tau: float
    """Mean tokens per pass of the model, the bonus token included; plain decoding is 1.00."""
    tau_by_category: Mapping[str, float]


def read_prompts(path: Path | None) -> list[Prompt]:
    """Read {"prompt": ..., "category": ...} lines; without a path, the set that comes with Headway."""
    file = resources.files("headway.server").joinpath("prompts.jsonl") if path is None else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    prompts = [
        _read_prompt(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line
    ]
    if not prompts:
        raise UsageError(
            f'{file}: has no prompts; a line is {{"prompt": "...", "category": "..."}}'
        )
    return prompts


def pick(prompts: Sequence[Prompt], num_prompts: int) -> list[Prompt]:
    """Take that many prompts: evenly from the whole list, or each again where there are too few.

    Example: 3 of 7 are those at 0, 2 and 4; 5 of 2 are those at 0, 1, 0, 1 and 0.
    """
    if num_prompts > len(prompts):
        return [prompts[index % len(prompts)] for index in range(num_prompts)]
    return [prompts[index * len(prompts) // num_prompts] for index in range(num_prompts)]


def run(
    engine: Engine, records: list[StepRecord], requests: Iterable[Request], batch_size: int
) -> Run:
    """Run requests, `batch_size` at a time, the next one joining where one ends.

    `records` is the list that the engine's observe_step appends to.
    """
    result = Run()
    waiting = deque(requests)
    live: dict[str, list[int]] = {}
    num_prompt_tokens: dict[str, int] = {}
    started = perf_counter()
    while waiting or live:
        while waiting and len(live) < batch_size:
            request = waiting.popleft()
            live[request.request_id] = []
            num_prompt_tokens[request.request_id] = len(request.prompt_ids)
            engine.add(request)
        is_decode = all(live.values())
        if is_decode:
            result.num_context_tokens += sum(
                num_prompt_tokens[key] + len(answer) for key, answer in live.items()
            )
        records.clear()
        outputs = engine.step()
        _note_step(result, records, outputs, is_decode)
        for output in outputs:
            live[output.request_id] += output.token_ids
            if output.finish is not None:
                result.token_ids[output.request_id] = tuple(live.pop(output.request_id))
                result.speculation[output.request_id] = output.finish.speculation
    result.seconds = perf_counter() - started
    result.pass_seconds = dict(engine.snapshot().step_seconds)
    return result


def summarise(
    speculation: str,
    batch_size: int,
    requests: Sequence[Request],
    categories: Mapping[str, str],
    runs: Sequence[Run],
) -> CaseResult:
    """Boil the runs of a case down. `categories` gives the kind of each request by its id."""
    steps = [step for each in runs for step in each.decode_steps]
    stats = runs[0].speculation
    return CaseResult(
        speculation=speculation,
        batch_size=batch_size,
        num_prompt_tokens=sum(len(request.prompt_ids) for request in requests),
        num_new_tokens=runs[0].num_new_tokens,
        tokens_per_second=Spread.of([each.num_new_tokens / each.seconds for each in runs]),
        decode_tokens_per_second=Spread.of(
            [each.num_decoded / each.decode_seconds for each in runs if each.decode_steps]
        ),
        prompt_seconds=Spread.of([each.prompt_seconds for each in runs]),
        step_ms={
            phase: Spread.of([getattr(step, f"{phase}_seconds") * 1e3 for step in steps])
            for phase in PHASES
        },
        pass_ms={rows: seconds * 1e3 for rows, seconds in runs[-1].pass_seconds.items()},
        rows_per_step=_mean([step.num_tokens for step in steps]),
        sequences_per_step=_mean([step.num_sequences for step in steps]),
        context_per_sequence=_ratio(
            sum(each.num_context_tokens for each in runs), sum(step.num_sequences for step in steps)
        ),
        tau=_tau(stats.values()),
        tau_by_category={
            category: _tau(stats[key] for key in stats if categories[key] == category)
            for category in dict.fromkeys(categories.values())
        },
    )


def first_token_seconds(engine: Engine, prompt_ids: Sequence[int], num_repeats: int) -> Spread:
    """Time a prompt of its own from its arrival to its first token, with nothing cached."""
    times = []
    for index in range(num_repeats + 1):
        request = Request(
            request_id=f"first {index}",
            prompt_ids=tuple(prompt_ids),
            stopping=StoppingParams(max_new_tokens=1),
            use_prefix_cache=False,
        )
        times.append(run(engine, [], [request], 1).seconds)
    return Spread.of(times[1:])  # the first one warms up


def first_difference(one: Run, other: Run) -> str | None:
    """Tell where two runs of the same requests part, or None where they are equal."""
    for key, ids in one.token_ids.items():
        others = other.token_ids[key]
        if ids != others:
            pairs = zip(ids, others, strict=False)
            place = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others))
            )
            return f"prompt {key}, token {place}: {ids[place : place + 1]} against {others[place : place + 1]}"
    return None


def _note_step(
    result: Run, records: Sequence[StepRecord], outputs: Sequence[Output], is_decode: bool
) -> None:
    seconds = sum(record.step_seconds for record in records)
    if is_decode:
        result.decode_steps += records
        result.num_decoded += sum(len(output.token_ids) for output in outputs)
    else:
        result.prompt_seconds += seconds


def _mean(values: Sequence[float]) -> float:
    return _ratio(sum(values), len(values))


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


def _tau(stats: Iterable[SpeculationStats]) -> float:
    found = list(stats)
    return tau(sum(each.num_emitted for each in found), sum(each.num_steps for each in found))


def _read_prompt(line: str, place: str) -> Prompt:
    try:
        values = json.loads(line)
        prompt = Prompt(**values)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f'{place}: {error}; a line is {{"prompt": "...", "category": "..."}}'
        ) from error
    if not (isinstance(prompt.prompt, str) and prompt.prompt and isinstance(prompt.category, str)):
        raise UsageError(f"{place}: prompt and category must be text, and the prompt not empty")
    return prompt
