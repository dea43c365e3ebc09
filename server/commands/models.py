"""`headway models pull` and `headway models list`."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from rich.console import Console
from rich.table import Table

from headway.engine.models import store
from headway.server.commands.progress import progress_bars
from headway.server.settings import POSITIONAL


@dataclass(frozen=True, slots=True)
class PullConfig:
    """Get a model of the catalogue."""

    name: Annotated[str, POSITIONAL] = store.DEFAULT_MODEL
    """Which one; `headway models list` shows them all."""


@dataclass(frozen=True, slots=True)
class ListConfig:
    """List the models of the catalogue."""

    json: bool = False
    """Print JSON instead of a table."""


def pull(config: PullConfig) -> int:
    """Download a model, unless it is here, and print where it is."""
    with progress_bars(Console(stderr=True)) as report:
        path = store.pull(config.name, report)
    print(path)
    return 0


def list_models(config: ListConfig) -> int:
    """Print name, size, licence and state of every known model."""
    listings = store.list_models()
    if config.json:
        print(json.dumps([asdict(listing) for listing in listings], indent=2, default=str))
        return 0
    table = Table("name", "model", "MB", "licence", "state", "path")
    for listing in listings:
        table.add_row(
            listing.name,
            listing.title,
            f"{listing.num_bytes / 1e6:.0f}",
            listing.licence,
            listing.state,
            str(listing.path) if listing.state == "pulled" else "",
        )
    Console().print(table)
    return 0
