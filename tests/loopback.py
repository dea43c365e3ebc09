"""A server on loopback with a fake engine behind it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from fake_engine import FakeEngine, served
from headway.protos import text_generation_pb2_grpc as pb_grpc
from headway.server.app import App
from headway.server.config import ServeConfig

LOCAL = {"port": 0, "metrics_port": -1, "drain_grace_seconds": 0.0, "drain_seconds": 5.0}


@dataclass
class Running:
    app: App
    engine: Any  # a FakeEngine or an EngineLoop
    channel: grpc.aio.Channel
    stub: "pb_grpc.TextGenerationAsyncStub"  # exists for type checkers only

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.app.port}"

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels, whatever others they have."""
        found = [
            sample.value
            for family in self.app.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"{name} {labels} is not there"
        return sum(found)


@asynccontextmanager
async def running(
    engine: Any = None, *, opened: bool = True, **settings: object
) -> AsyncIterator[Running]:
    """Start a server, and check on the way out that nothing is left of its requests."""
    engine = engine or FakeEngine()
    app = App(ServeConfig(**{**LOCAL, **settings}), "tiny")  # type: ignore[arg-type]
    await app.start()
    if opened:
        app.open(served(engine))
        await app.health.refresh()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
            yield Running(app, engine, channel, pb_grpc.TextGenerationStub(channel))  # type: ignore[arg-type]
    finally:
        await app.stop()
    if opened and not engine.failure:
        assert engine.num_requests == 0
        assert app._live is not None
        assert app._live.is_idle


@contextmanager
def threaded(engine: FakeEngine | None = None) -> Iterator[Running]:
    """Run a server's event loop on a thread, so that the test may block."""
    started, found = threading.Event(), []

    async def host() -> None:
        async with running(engine) as server:
            stop = asyncio.Event()
            found.extend([server, asyncio.get_running_loop(), stop])
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(host()))
    thread.start()
    assert started.wait(10)
    server, loop, stop = found
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()
