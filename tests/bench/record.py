"""Measure the engine and keep the numbers: `python tests/bench/record.py [flags of bench engine]`.

Appends one JSON line per number to tests/bench/results/engine.jsonl. README quotes these lines. Run it
on an idle machine; ratios between lines of one run hold better than lines of different days.
"""

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.server.cli import main

RESULTS = Path(__file__).parent / "results" / "engine.jsonl"


def record(flags: list[str]) -> int:
    """Run the bench, then append what it measured. Nothing is kept of a run whose outputs differ."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        status = main(["bench", "engine", "--json", str(path), *flags])
        if status:
            print("not recorded: the run failed or its outputs differ", file=sys.stderr)
            return status
        measured = json.loads(path.read_text())
    with RESULTS.open("a") as file:
        for line in lines(measured):
            file.write(json.dumps(line) + "\n")
    return 0


def lines(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line for each number of each case."""
    head = {
        "time": measured["time"],
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(
            git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/bench/results")
        ),
        "machine": {"cpu": cpu(), **measured["machine"]},
        "model": measured["model"],
        "dtype": measured["dtype"],
    }
    for case in measured["cases"]:
        where = {"speculation": case["speculation"], "batch_size": case["batch_size"]}
        numbers = {
            "tokens_per_second": (case["tokens_per_second"], "tok/s"),
            "decode_tokens_per_second": (case["decode_tokens_per_second"], "tok/s"),
            **{f"{phase}_ms": (spread, "ms") for phase, spread in case["step_ms"].items()},
        }
        for metric, (spread, unit) in numbers.items():
            yield {**head, **where, "metric": metric, "unit": unit, **spread}
        for category, tau in {"all": case["tau"], **case["tau_by_category"]}.items():
            kind = {"category": category, "metric": "tau", "unit": "tokens/pass"}
            yield {**head, **where, **kind, "p50": tau}


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
    sys.exit(record(sys.argv[1:]))
