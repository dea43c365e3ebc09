"""How the benches show and write what they measured."""

import json
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console

from headway.engine.errors import UsageError
from headway.engine.machine import usable_cores

STYLE: dict[str, Any] = {"box": SIMPLE, "padding": (0, 1, 0, 0)}
"""Of tables with more columns than 80 characters could hold otherwise."""


def machine() -> dict[str, object]:
    """Tell what a figure was measured on."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "num_cores": usable_cores(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers")},
    }


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write what was measured. Raises UsageError."""
    text = json.dumps(record, indent=2, default=str) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def shown(number: float | None) -> str:
    """Show a measured number in few columns: three digits or so."""
    if number is None:
        return "-"
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"


def report_console() -> Console:
    """A console for tables: as wide as the terminal, and wide enough for all figures in a file."""
    return Console(width=None if sys.stdout.isatty() else 120)
