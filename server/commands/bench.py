"""`headway bench engine`: time per step, overhead, tokens/s and tau, without gRPC."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headway.engine.errors import InvalidRequest, UsageError
from headway.engine.machine import resident_bytes
from headway.engine.request import Request, SamplingParams, StoppingParams
from headway.engine.stats import StepRecord
from headway.engine.validation import check_request
from headway.protos import text_generation_pb2 as pb
from headway.server.assembly import (
    NO_HEADS,
    Assembled,
    DrafterChoice,
    ModelSettings,
    assemble,
    make_engine,
)
from headway.server.commands.bench_output import STYLE, machine, report_console, shown, write_json
from headway.server.commands.progress import progress_bars
from headway.server.engine_bench import (
    CaseResult,
    Prompt,
    Run,
    Spread,
    first_difference,
    first_token_seconds,
    pick,
    read_prompts,
    run,
    summarise,
)
from headway.server.prompt import read_prompt
from headway.server.roofline import Roofline, measure_roofline
from headway.server.settings import FLAT, flat_items

NUM_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class BenchEngineConfig:
    """Measure the engine on a set of prompts.

    Each prompt is a chat message, or plain text for a model without a chat template. The prefix cache
    is not used. The outputs of all ways to speculate must be equal, or the exit code is 1.
    """

    modes: tuple[DrafterChoice, ...] = ()
    """Ways to speculate, the first one to compare with; none means off, suffix and given heads."""
    batch_sizes: tuple[int, ...] = (1, 4, 8, 16)
    """Requests in flight at the same time."""
    max_new_tokens: int = 64
    """Tokens of each answer at most."""
    num_repeats: int = 3
    """Runs over all prompts, after a short one to warm up."""
    temperature: float = 0.0
    """0 is greedy; above it, prompt i is sampled with seed i."""
    prompts: Path | None = None
    """JSONL file of {"prompt": ..., "category": ...}; Headway's own twelve when not given."""
    num_prompts: int = 0
    """Prompts taken, evenly from the whole file; 0 takes all. They repeat where a batch needs more."""
    prefill_tokens: int = 512
    """Length of a prompt that is timed alone, to tell tokens/s of computing prompts; 0 leaves it out."""
    first_token_tokens: int = 30
    """Length of a prompt whose first token is timed; 0 leaves it out."""
    check_identical: bool = True
    """Compare the outputs of all ways to speculate."""
    json: Path | None = None
    """File for everything that was measured."""
    model: Annotated[ModelSettings, FLAT] = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        for name, values in (
            ("batch_sizes", self.batch_sizes),
            ("max_new_tokens", (self.max_new_tokens,)),
            ("num_repeats", (self.num_repeats,)),
        ):
            if not values or min(values) < 1:
                raise ValueError(f"{name} is {values}; numbers of at least 1 are needed")
        for name in ("num_prompts", "prefill_tokens", "first_token_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; 0 or more is needed")
        if "heads" in self.modes and self.model.heads is None:
            raise ValueError(NO_HEADS)


def bench_engine(config: BenchEngineConfig) -> int:
    """Measure every way to speculate at every batch size, show it and compare the outputs."""
    console = Console(stderr=True)
    bytes_before = resident_bytes()
    prompts = read_prompts(config.prompts)
    prompts = pick(prompts, max(config.num_prompts or len(prompts), *config.batch_sizes))
    with progress_bars(console) as report:
        assembled = assemble(config.model, report)
    requests = make_requests(config, prompts, assembled)
    categories = {str(index): prompt.category for index, prompt in enumerate(prompts)}
    modes = config.modes or _default_modes(config.model)
    cases: list[CaseResult] = []
    outputs: dict[tuple[str, int], Run] = {}
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task("bench", total=len(config.batch_sizes))
        for batch_size in config.batch_sizes:
            bars.update(task, description=f"batch {batch_size}")
            for mode, runs in measure(config, assembled, requests, modes, batch_size).items():
                cases.append(summarise(mode, batch_size, requests, categories, runs))
                outputs[mode, batch_size] = runs[0]
            bars.advance(task)
        bars.update(task, description="prompts")
        first_tokens = measure_first_tokens(config, assembled, requests)
    memory = resident_bytes(peak=True) - bytes_before  # before the roofline's probes take theirs
    roofline = measure_roofline(assembled.loaded.model, assembled.settings.engine, cases)
    report_console().print(*_tables(cases, roofline))
    report_console().print(*_lines(first_tokens, memory), sep="\n")
    differences = _differences(outputs) if config.check_identical else []
    if config.json is not None:
        lone = {length: asdict(spread) for length, spread in first_tokens.items()}
        record = _record(config, assembled, cases, differences) | {
            "first_token_seconds": lone,
            "peak_bytes_over_imports": memory,
            "roofline": None if roofline is None else asdict(roofline),
        }
        write_json(config.json, record)
    return _report(differences, config.check_identical and len(modes) > 1)


def make_requests(
    config: BenchEngineConfig, prompts: Sequence[Prompt], assembled: Assembled
) -> list[Request]:
    """Tokenise the prompts; request i is named str(i)."""
    return [
        Request(
            request_id=str(index),
            prompt_ids=_tokenise(assembled.tokenizer, prompt.prompt),
            stopping=StoppingParams(config.max_new_tokens),
            sampling=SamplingParams(temperature=config.temperature, seed=index),
            use_prefix_cache=False,
        )
        for index, prompt in enumerate(prompts)
    ]


def measure(
    config: BenchEngineConfig,
    assembled: Assembled,
    requests: Sequence[Request],
    modes: Sequence[DrafterChoice],
    batch_size: int,
) -> dict[DrafterChoice, list[Run]]:
    """Run all requests `num_repeats` times in each mode, the modes by turns.

    So what else the machine does hits every mode. Each has an engine made for this batch size alone.
    """
    engines = {}
    for mode in modes:
        records: list[StepRecord] = []
        engine = make_engine(assembled, mode, records.append)
        for request in requests:
            try:
                check_request(request, engine.limits)
            except InvalidRequest as error:
                raise UsageError(f"prompt {request.request_id}: {error}") from error
        run(engine, records, [_shortened(request) for request in requests[:batch_size]], batch_size)
        engines[mode] = engine, records
    runs: dict[DrafterChoice, list[Run]] = {mode: [] for mode in modes}
    for _ in range(config.num_repeats):
        for mode, (engine, records) in engines.items():
            runs[mode].append(run(engine, records, requests, batch_size))
    return runs


def measure_first_tokens(
    config: BenchEngineConfig, assembled: Assembled, requests: Sequence[Request]
) -> dict[int, Spread]:
    """Time the first token of prompts of the lengths asked for, or as long as the engine takes."""
    engine = make_engine(assembled, "off")
    longest = min(engine.limits.max_context_tokens, engine.limits.max_cache_tokens) - 1
    text = cycle(token_id for request in requests for token_id in request.prompt_ids)
    ids = list(islice(text, max(config.prefill_tokens, config.first_token_tokens)))
    lengths = (config.first_token_tokens, config.prefill_tokens)
    return {
        length: first_token_seconds(engine, ids[:length], config.num_repeats)
        for length in (min(each, longest) for each in lengths if each)
    }


def _tokenise(tokenizer: Any, text: str) -> tuple[int, ...]:
    message = pb.GenerateRequest()
    if tokenizer.chat_template is None:
        message.text = text
    else:
        message.chat.messages.add(role="user", content=text)
    return read_prompt(tokenizer, message)


def _shortened(request: Request) -> Request:
    num_tokens = min(request.stopping.max_new_tokens, NUM_WARM_UP_TOKENS)
    return replace(request, stopping=StoppingParams(num_tokens))


def _default_modes(settings: ModelSettings) -> tuple[DrafterChoice, ...]:
    return ("off", "suffix") if settings.heads is None else ("off", "suffix", "heads")


def _differences(outputs: Mapping[tuple[str, int], Run]) -> list[str]:
    """Compare the ways to speculate at each batch size with the first one."""
    found = []
    firsts: dict[int, tuple[str, Run]] = {}
    for (mode, batch_size), result in outputs.items():
        first_mode, first = firsts.setdefault(batch_size, (mode, result))
        difference = first_difference(first, result)
        if difference is not None:
            found.append(f"batch {batch_size}, {first_mode} against {mode}: {difference}")
    return found


def _report(differences: Sequence[str], is_compared: bool) -> int:
    for difference in differences:
        print(f"outputs differ: {difference}", file=sys.stderr)
    if is_compared and not differences:
        print("The outputs are the same token for token in every mode.")
    return 1 if differences else 0


def _record(
    config: BenchEngineConfig,
    assembled: Assembled,
    cases: Sequence[CaseResult],
    differences: Sequence[str],
) -> dict[str, object]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "model": assembled.loaded.name,
        "dtype": str(assembled.loaded.model.dtype).removeprefix("torch."),
        "config": dict(flat_items(config)),
        "is_identical": not differences if config.check_identical else None,
        "differences": list(differences),
        "cases": [asdict(case) for case in cases],
    }


def _tables(cases: Sequence[CaseResult], roofline: Roofline | None) -> Iterator[Table]:
    yield _step_table(cases)
    if any(case.pass_ms for case in cases):
        yield _pass_table(cases)
    if roofline is not None:
        yield _roofline_table(cases, roofline)
    yield _tau_table(cases)


def _step_table(cases: Sequence[CaseResult]) -> Table:
    phases = ("step", "model", "draft", "schedule", "accept", "commit")
    table = Table(
        *("mode", "batch", "tau", "tok/s", "decode", *(phase[:6] for phase in phases)),
        title="Steps without prompts, medians in ms",
        caption="tau: mean tokens per pass of the model and request, the bonus token included; plain "
        "decoding is 1.00. tok/s: new tokens over all time; decode: over steps without prompts.",
        **STYLE,
    )
    for case in cases:
        table.add_row(
            case.speculation,
            str(case.batch_size),
            f"{case.tau:.2f}",
            shown(case.tokens_per_second.p50),
            shown(case.decode_tokens_per_second.p50),
            *(shown(case.step_ms[phase].p50) for phase in phases),
        )
    return table


def _pass_table(cases: Sequence[CaseResult]) -> Table:
    drafting = [case for case in cases if case.pass_ms]
    table = Table(
        *("mode", "batch", *map(str, drafting[0].pass_ms)),
        title="A pass of the model by its rows, in ms, as drafts are chosen by",
        **STYLE,
    )
    for case in drafting:
        table.add_row(case.speculation, str(case.batch_size), *map(shown, case.pass_ms.values()))
    return table


def _roofline_table(cases: Sequence[CaseResult], roofline: Roofline) -> Table:
    rates, work = roofline.rates, roofline.work
    table = Table(
        *("mode", "batch", "rows", "MB", "GMAC", "by", "least", "step", "of it"),
        title="Roofline: the least time of a step on this machine, in ms",
        caption=f"MB read and multiply-adds of a mean step. Measured in this run: {rates.read_bytes_per_second / 1e9:.1f} GB/s read from a "
        f"buffer of {rates.read_buffer_bytes / 1e6:.0f} MB, {rates.multiply_adds_per_second / 1e9:.0f} "
        f"G multiply-adds/s in {rates.arithmetic}. Weights: {work.weight_bytes / 1e6:.1f} MB.",
        **STYLE,
    )
    for case, bound in zip(cases, roofline.bounds, strict=True):
        step_ms = case.step_ms["step"].p50
        table.add_row(
            case.speculation,
            str(case.batch_size),
            f"{case.rows_per_step:.1f}",
            f"{bound.num_bytes / 1e6:.1f}",
            f"{bound.multiply_adds / 1e9:.2f}",
            bound.by,
            shown(bound.ms),
            shown(step_ms),
            f"{bound.ms / step_ms:.0%}",
        )
    return table


def _lines(first_tokens: Mapping[int, Spread], memory: int) -> Iterator[str]:
    for length, spread in first_tokens.items():
        yield (
            f"First token of a prompt of {length} tokens: {spread.p50 * 1e3:.1f} ms, "
            f"{length / spread.p50:.0f} tokens/s."
        )
    if memory > 0:
        yield f"Peak memory above what was held before the model was loaded: {memory / 1e6:.0f} MB."


def _tau_table(cases: Sequence[CaseResult]) -> Table:
    categories = list(cases[0].tau_by_category)
    table = Table("mode", "batch", *categories, title="tau by kind of prompt", **STYLE)
    for case in cases:
        taus = [f"{case.tau_by_category[category]:.2f}" for category in categories]
        table.add_row(case.speculation, str(case.batch_size), *taus)
    return table
