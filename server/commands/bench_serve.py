"""`headway bench serve`: a server under load over gRPC, with speculation on and off by turns."""

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import grpc
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headway.engine.errors import InvalidRequest, UsageError
from headway.protos import text_generation_pb2 as pb
from headway.server.assembly import ModelSettings
from headway.server.client import Client
from headway.server.commands.bench_output import STYLE, machine, report_console, shown, write_json
from headway.server.engine_bench import Prompt, pick, read_prompts
from headway.server.local import child_server
from headway.server.serve_bench import Answer, Load, first_difference, run_load, summarise
from headway.server.settings import FLAT, flat_items

DEFAULT_CONCURRENCIES = (1, 4, 8, 16)
NUM_WARM_UP_TOKENS = 8
MAX_ERRORS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class BenchServeConfig:
    """Measure a server over gRPC.

    Without --address it serves the model itself, in a process of its own. Speculation on and off
    take turns within one run, so that what else the machine does hits both. The prefix cache is not
    used. Exit code 1 means that requests failed or were not sent in time.
    """

    address: str = ""
    """host:port of a server that runs; its model and settings are then its own."""
    max_concurrency: tuple[int, ...] = ()
    """Streams at the same time, one case for each: a closed loop. None means 1 4 8 16, or no bound
    where --request-rate is given."""
    request_rate: float = math.inf
    """Requests a second, as a Poisson process: an open loop. Infinite sends as the streams allow."""
    drafts: Literal["both", "on", "off"] = "both"
    """Whether requests allow drafts; both measures the two by turns."""
    num_prompts: int = 32
    """Requests of a case in one run; the prompts repeat where the file has fewer."""
    num_repeats: int = 2
    """Runs of each case, in turn with the others of the same number of streams."""
    max_new_tokens: int = 64
    """Tokens of each answer at most."""
    ignore_eos: bool = False
    """Go on to max_new_tokens where the model would end."""
    temperature: float = 0.0
    """0 is greedy; above it, request i is sampled with seed i."""
    seed: int = 0
    """Of the times at which requests come."""
    max_request_seconds: float = 120.0
    """A request that takes longer has failed."""
    max_seconds: float = 900.0
    """After this all requests fail that run or wait, and no case is begun."""
    prompts: Path | None = None
    """JSONL file of {"prompt": ..., "category": ...}; Headway's own twelve when not given."""
    json: Path | None = None
    """File for everything that was measured."""
    model: Annotated[ModelSettings, FLAT] = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        for name in ("num_prompts", "num_repeats", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("request_rate", "max_request_seconds", "max_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; more than 0 is needed")
        if min(self.max_concurrency, default=1) < 1:
            raise ValueError(f"max_concurrency is {self.max_concurrency}; at least 1 is needed")

    @property
    def speculations(self) -> tuple[bool, ...]:
        """One case for each, by whether drafts are allowed."""
        return {"both": (False, True), "on": (True,), "off": (False,)}[self.drafts]

    @property
    def loads(self) -> list[Load]:
        """One load for each number of streams."""
        is_open = not math.isinf(self.request_rate)
        bounds: tuple[int | None, ...] = self.max_concurrency
        if not bounds:
            bounds = (None,) if is_open else DEFAULT_CONCURRENCIES
        return [Load(bound, self.request_rate, self.seed) for bound in bounds]


@dataclass(slots=True)
class Case:
    """A load with or without speculation, and its runs so far."""

    load: Load
    is_speculative: bool
    runs: list[tuple[Sequence[Answer], float]] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        """What was measured, under vLLM's keys, after what was asked."""
        rate = self.load.request_rate
        return {
            "speculation": self.is_speculative,
            "max_concurrency": self.load.max_concurrency,
            "request_rate": "inf" if math.isinf(rate) else rate,
            **summarise(self.runs),
        }


def bench_serve(config: BenchServeConfig) -> int:
    """Run every case by turns, show what came of it and tell what failed."""
    console = Console(stderr=True)
    deadline = perf_counter() + config.max_seconds
    prompts = read_prompts(config.prompts)
    with _server(config, console) as address:
        model_name, is_chat = _ask(address)
        requests = {
            is_speculative: list(_requests(config, prompts, is_chat, is_speculative))
            for is_speculative in config.speculations
        }
        cases = _measure(config, address, requests, deadline, console)
    results = [case.result() for case in cases if case.runs]
    if results:
        report_console().print(_table(results))
    if config.json is not None:
        write_json(config.json, _record(config, model_name, results))
    return _report(console, cases, config.num_repeats)


def _server(config: BenchServeConfig, console: Console) -> AbstractContextManager[str]:
    if config.address:
        return nullcontext(config.address)
    console.print(f"loading {config.model.model} ...")
    return child_server(config.model)


def _ask(address: str) -> tuple[str, bool]:
    """Return the model's name and whether it takes chats. Raises UsageError where no server is."""
    with Client(address) as client:
        try:
            name = client.model_info(timeout_seconds=10.0).model
        except grpc.RpcError as error:
            call: Any = error  # every failed call is a Call, too
            raise UsageError(f"{address}: {call.details()}") from error
        try:
            client.tokenize([{"role": "user", "content": "a"}], timeout_seconds=10.0)
        except InvalidRequest:
            return name, False
        return name, True


def _requests(
    config: BenchServeConfig, prompts: Sequence[Prompt], is_chat: bool, is_speculative: bool
) -> Iterator[pb.GenerateStreamRequest]:
    for index, prompt in enumerate(pick(prompts, config.num_prompts)):
        request = pb.GenerateStreamRequest(use_prefix_cache=False)
        if is_chat:
            request.chat.messages.add(role="user", content=prompt.prompt)
        else:
            request.text = prompt.prompt
        request.stopping.max_new_tokens = config.max_new_tokens
        request.stopping.ignore_eos = config.ignore_eos
        request.sampling.temperature = config.temperature
        request.sampling.seed = index
        request.speculation.enabled = is_speculative
        yield request


def _measure(
    config: BenchServeConfig,
    address: str,
    requests: Mapping[bool, Sequence[pb.GenerateStreamRequest]],
    deadline: float,
    console: Console,
) -> list[Case]:
    """Run the cases, those of one load by turns: off on off on. Ends at the deadline."""

    def run(load: Load, some: Sequence[pb.GenerateStreamRequest]) -> tuple[list[Answer], float]:
        return asyncio.run(
            run_load(
                address,
                some,
                load,
                max_request_seconds=config.max_request_seconds,
                deadline=deadline,
            )
        )

    cases = [Case(load, each) for load in config.loads for each in config.speculations]
    run(Load(max_concurrency=4), [_shortened(each[0]) for each in requests.values()])
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task("bench", total=len(cases) * config.num_repeats)
        for load in config.loads:
            turns = [case for case in cases if case.load == load]
            for case in turns * config.num_repeats:
                if perf_counter() < deadline:
                    streams = load.max_concurrency or "any"
                    drafts = "on" if case.is_speculative else "off"
                    bars.update(task, description=f"{streams} streams, speculation {drafts}")
                    case.runs.append(run(load, requests[case.is_speculative]))
                    bars.advance(task)
    return cases


def _shortened(request: pb.GenerateStreamRequest) -> pb.GenerateStreamRequest:
    short = pb.GenerateStreamRequest()
    short.CopyFrom(request)
    short.stopping.max_new_tokens = min(request.stopping.max_new_tokens, NUM_WARM_UP_TOKENS)
    return short


def _report(console: Console, cases: Sequence[Case], num_repeats: int) -> int:
    """Say what failed and what was left out; answers that differ are told, for rounding may do that."""
    num_missing = sum(num_repeats - len(case.runs) for case in cases)
    if num_missing:
        console.print(f"{num_missing} runs were left out: --max-seconds had passed", style="red")
    num_failed = 0
    for case in cases:
        errors = [answer.error for each, _ in case.runs for answer in each if answer.error]
        num_failed += len(errors)
        for error in list(dict.fromkeys(errors))[:MAX_ERRORS_SHOWN]:
            console.print(f"failed: {error}", style="red", markup=False)
    if num_failed:
        console.print(f"{num_failed} requests failed", style="red")
    for one, other in itertools.combinations(cases, 2):
        if one.load == other.load and one.runs and other.runs:
            difference = first_difference(one.runs[0][0], other.runs[0][0])
            if difference is not None:
                console.print(f"answers differ with and without speculation: {difference}")
    return 1 if num_failed or num_missing else 0


def _record(
    config: BenchServeConfig, model_name: str, results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "backend": "headway",
        "model_id": model_name,
        "num_prompts": config.num_prompts,
        "config": dict(flat_items(config)),
        "cases": list(results),
    }


def _table(results: Sequence[Mapping[str, Any]]) -> Table:
    columns = {
        "output_throughput": "tok/s",
        "request_throughput": "req/s",
        "tau": "tau",
        "median_ttft_ms": "ttft",
        "p99_ttft_ms": "p99",
        "median_tpot_ms": "tpot",
        "median_itl_ms": "itl",
        "median_e2el_ms": "e2el",
    }
    table = Table(
        *("streams", "drafts", "failed", *columns.values()),
        title="Over gRPC, medians in ms",
        **STYLE,
        caption="tok/s: new tokens of whole answers, counted by id, over all time. ttft: to the first "
        "token, and its 99th percentile; tpot: per token after it; itl: between messages, which may "
        "hold several; e2el: end to end. tau: mean tokens per pass of the model, the bonus token "
        "included; plain decoding is 1.00.",
    )
    for result in results:
        table.add_row(
            str(result["max_concurrency"] or "any"),
            "on" if result["speculation"] else "off",
            f"{result['failed']}/{result['failed'] + result['completed']}",
            *(shown(result[key]) for key in columns),
        )
    return table
