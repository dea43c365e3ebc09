"""Bars for what takes long at the start: download, conversion, loading."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from headway.engine.models.cache import Progress as ReportBytes


@contextmanager
def progress_bars(console: Console) -> Iterator[ReportBytes]:
    """Draw a bar for each stage that is reported to the function given out."""
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=console)
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done_bytes: int, total_bytes: int) -> None:
        # Started here, because a display without bars still leaves an empty line.
        bars.start()
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total_bytes)
        bars.update(tasks[stage], completed=done_bytes, total=total_bytes)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()
