"""Measure and keep the numbers: `python tests/bench/record.py [engine|serve] [flags of that bench]`.

Appends one JSON line per number to tests/bench/results/NAME.jsonl. README quotes these lines. Run it
on an idle machine; ratios between lines of one run hold better than lines of different days.
peers.py keeps its numbers by `head` and `append` here.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headway.server.cli import main
from headway.server.commands.bench_output import machine

RESULTS = Path(__file__).parent / "results"


def record(name: str, flags: list[str]) -> int:
    """Run a bench, then append what it measured. Nothing is kept of a run that fails.

    bench engine fails where outputs differ, bench serve where a request does.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        status = main(["bench", name, "--json", str(path), *flags])
        if status:
            print("not recorded: the run failed", file=sys.stderr)
            return status
        measured = json.loads(path.read_text())
    lines = {"engine": engine_lines, "serve": serve_lines}[name]
    append(RESULTS / f"{name}.jsonl", ({**head(), **line} for line in lines(measured)))
    return 0


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Add lines to a file of records."""
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


def head() -> dict[str, Any]:
    """Say when, with which code and on what: the start of every record."""
    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/bench/results"
    )
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(changed),
        "machine": {"cpu": cpu(), **machine()},
    }


def engine_lines(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line for each number of each case, then what is not of a case."""
    what = {"model": measured["model"], "dtype": measured["dtype"]}
    roofline = measured["roofline"]
    for index, case in enumerate(measured["cases"]):
        where = {**what, "speculation": case["speculation"], "batch_size": case["batch_size"]}
        numbers = {
            "tokens_per_second": (case["tokens_per_second"], "tok/s"),
            "decode_tokens_per_second": (case["decode_tokens_per_second"], "tok/s"),
            **{f"{phase}_ms": (spread, "ms") for phase, spread in case["step_ms"].items()},
        }
        for metric, (spread, unit) in numbers.items():
            yield {**where, "metric": metric, "unit": unit, **spread}
        for category, tau in {"all": case["tau"], **case["tau_by_category"]}.items():
            kind = {"category": category, "metric": "tau", "unit": "tokens/pass"}
            yield {**where, **kind, "p50": tau}
        if roofline is not None:
            bound = roofline["bounds"][index]
            for metric in ("memory_ms", "compute_ms"):
                yield {**where, "metric": f"roofline_{metric}", "unit": "ms", "p50": bound[metric]}
    if roofline is not None:
        for rate in ("read_bytes_per_second", "multiply_adds_per_second"):
            yield {**what, "metric": rate, "unit": "/s", "p50": roofline["rates"][rate]}
    for length, spread in measured["first_token_seconds"].items():
        where = {**what, "num_prompt_tokens": int(length), "metric": "first_token_seconds"}
        yield {**where, "unit": "s", **spread}
    if memory := measured["peak_bytes_over_imports"]:
        yield {**what, "metric": "peak_bytes_over_imports", "unit": "bytes", "p50": memory}


def serve_lines(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line for each case, without what there is of each request."""
    for case in measured["cases"]:
        numbers = {key: value for key, value in case.items() if key not in PER_REQUEST}
        yield {"model": measured["model_id"], **numbers}


PER_REQUEST = {
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "start_times",
    "generated_texts",
    "errors",
}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()


def cpu() -> str:
    """The processor's name, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    given = sys.argv[1:]
    is_named = bool(given) and not given[0].startswith("-")
    sys.exit(record(given[0] if is_named else "engine", given[1:] if is_named else given))
