"""`headway serve`: a model over gRPC, until a signal."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from rich.console import Console

from headway.engine.stats import StepRecord
from headway.server import app
from headway.server.assembly import ModelSettings, assemble, make_served
from headway.server.commands.progress import progress_bars
from headway.server.config import ServeConfig
from headway.server.engine_door import ServedModel
from headway.server.settings import FLAT, flat_items

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeCommandConfig:
    """Serve a model over gRPC.

    Exit code 0 after SIGTERM or SIGINT, 1 when the engine died, 2 when the server cannot start.
    """

    model: Annotated[ModelSettings, FLAT] = field(default_factory=ModelSettings)
    server: Annotated[ServeConfig, FLAT] = field(default_factory=ServeConfig)


def serve(config: ServeCommandConfig) -> int:
    """Log the effective config, then serve until the end."""
    logger.info("config %s", " ".join(f"{name}={value!r}" for name, value in flat_items(config)))

    console = Console(stderr=True)

    def load(observe_step: Callable[[StepRecord], None]) -> ServedModel:
        with progress_bars(console) as report:
            assembled = assemble(config.model, report)
        return make_served(assembled, observe_step)

    status = asyncio.run(app.serve(config.server, config.model.model, load))
    if any(thread.name == app.LOAD_THREAD for thread in threading.enumerate()):
        # A signal came while the model loads. Python's own way out would take torch's threads from
        # under that load, and the process would abort.
        console.show_cursor()
        logging.shutdown()
        os._exit(status)
    return status
