"""`headway bench engine`: time per step, overhead, tokens/s and tau, without gRPC."""

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headway.engine.errors import InvalidRequest, UsageError
from headway.engine.machine import usable_cores
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
from headway.server.commands.progress import progress_bars
from headway.server.engine_bench import (
    CaseResult,
    Prompt,
    Run,
    first_difference,
    read_prompts,
    run,
    summarise,
)
from headway.server.prompt import read_prompt
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
    batch_sizes: tuple[int, ...] = (1, 4)
    """Requests in flight at the same time."""
    max_new_tokens: int = 64
    """Tokens of each answer at most."""
    num_repeats: int = 3
    """Runs over all prompts, after a short one to warm up."""
    temperature: float = 0.0
    """0 is greedy; above it, prompt i is sampled with seed i."""
    prompts: Path | None = None
    """JSONL file of {"prompt": ..., "category": ...}; Headway's own twelve when not given."""
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
        if "heads" in self.modes and self.model.heads is None:
            raise ValueError(NO_HEADS)


def bench_engine(config: BenchEngineConfig) -> int:
    """Measure every way to speculate at every batch size, show it and compare the outputs."""
    console = Console(stderr=True)
    prompts = read_prompts(config.prompts)
    with progress_bars(console) as report:
        assembled = assemble(config.model, report)
    requests = make_requests(config, prompts, assembled)
    categories = {str(index): prompt.category for index, prompt in enumerate(prompts)}
    modes = config.modes or _default_modes(config.model)
    cases: list[CaseResult] = []
    outputs: dict[tuple[str, int], Run] = {}
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task("bench", total=len(modes) * len(config.batch_sizes))
        for mode in modes:
            for batch_size in config.batch_sizes:
                bars.update(task, description=f"{mode}, batch {batch_size}")
                runs = measure(config, assembled, requests, mode, batch_size)
                cases.append(summarise(mode, batch_size, requests, categories, runs))
                outputs[mode, batch_size] = runs[0]
                bars.advance(task)
    Console().print(_step_table(cases), _tau_table(cases))
    differences = _differences(outputs) if config.check_identical else []
    if config.json is not None:
        _write(config.json, _record(config, assembled, cases, differences))
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
    mode: DrafterChoice,
    batch_size: int,
) -> list[Run]:
    """Run all requests `num_repeats` times with an engine made for this case alone."""
    records: list[StepRecord] = []
    engine = make_engine(assembled, mode, records.append)
    for request in requests:
        try:
            check_request(request, engine.limits)
        except InvalidRequest as error:
            raise UsageError(f"prompt {request.request_id}: {error}") from error
    warm_up = [_shortened(request) for request in requests[:batch_size]]
    run(engine, records, warm_up, batch_size)
    return [run(engine, records, requests, batch_size) for _ in range(config.num_repeats)]


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
        "machine": {
            "platform": f"{platform.system()} {platform.machine()}",
            "num_cores": usable_cores(),
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers")},
        },
        "model": assembled.loaded.name,
        "dtype": str(assembled.loaded.model.dtype).removeprefix("torch."),
        "config": dict(flat_items(config)),
        "is_identical": not differences if config.check_identical else None,
        "differences": list(differences),
        "cases": [asdict(case) for case in cases],
    }


def _write(path: Path, record: Mapping[str, object]) -> None:
    text = json.dumps(record, indent=2, default=str) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def _step_table(cases: Sequence[CaseResult]) -> Table:
    table = Table(
        *(
            "mode",
            "batch",
            "tau",
            "tok/s",
            "decode",
            "step",
            "model",
            "draft",
            "other",
        ),
        title="Steps without prompts, medians in ms",
        caption="tau: mean tokens per pass of the model and request, the bonus token included; plain "
        "decoding is 1.00. tok/s: new tokens over all time; decode: over steps without prompts. "
        "other: the engine outside model and drafter.",
    )
    for case in cases:
        table.add_row(
            case.speculation,
            str(case.batch_size),
            f"{case.tau:.2f}",
            f"{case.tokens_per_second.p50:.1f}",
            f"{case.decode_tokens_per_second.p50:.1f}",
            *(f"{case.step_ms[phase].p50:.2f}" for phase in ("step", "model", "draft", "overhead")),
        )
    return table


def _tau_table(cases: Sequence[CaseResult]) -> Table:
    categories = list(cases[0].tau_by_category)
    table = Table("mode", "batch", *categories, title="tau by kind of prompt")
    for case in cases:
        taus = [f"{case.tau_by_category[category]:.2f}" for category in categories]
        table.add_row(case.speculation, str(case.batch_size), *taus)
    return table
