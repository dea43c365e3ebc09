"""The server as a process: ports first, then the model, then requests, until a signal or a death.

One event loop owns grpc.aio; the engine and the metrics port have threads of their own.
"""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headway.engine.errors import UsageError
from headway.engine.stats import StepRecord
from headway.protos import text_generation_pb2_grpc as pb_grpc
from headway.server.config import ServeConfig
from headway.server.engine_door import EngineDoor, ServedModel
from headway.server.health import SERVICE_NAME, Health
from headway.server.interceptor import ErrorInterceptor
from headway.server.live import LiveRequests
from headway.server.metrics import Metrics
from headway.server.metrics_http import MetricsServer
from headway.server.service import TextGeneration

logger = logging.getLogger(__name__)

LoadModel = Callable[[Callable[[StepRecord], None]], ServedModel]
"""Loads and warms up; what it is given observes every step of the engine."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_OK, EXIT_FAILED = 0, 1
LOAD_THREAD = "load"
ABORT_SECONDS = 5.0
"""How long aborted requests get to tell their clients."""
POLL_SECONDS = 0.02


class App:
    """All parts of a running server. `start` binds the ports, `open` adds the model."""

    def __init__(self, config: ServeConfig, model_name: str) -> None:
        self.metrics = Metrics(model_name)
        self.health = Health(config.max_stall_seconds)
        self.port = 0
        """The gRPC port, once bound."""
        self.metrics_port = -1
        """The HTTP port, once bound; -1 where there is none."""
        self._config = config
        self._service = TextGeneration(config, self.metrics)
        self._engine: EngineDoor | None = None
        self._live: LiveRequests | None = None
        self._http: MetricsServer | None = None
        self._grpc: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Bind both ports and answer health checks. Raises UsageError."""
        config = self._config
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor(self.metrics, "headway.v1")], options=options(config)
        )
        pb_grpc.add_TextGenerationServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, server)
        if config.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        try:
            self.port = server.add_insecure_port(f"{config.host}:{config.port}")
        except RuntimeError as error:
            raise _port_unavailable("port", config.host, config.port) from error
        if config.metrics_port >= 0:
            self._open_metrics()
        await self.health.refresh()
        await server.start()
        self._grpc = server
        logger.info("grpc=%s:%d metrics_port=%d", config.host, self.port, self.metrics_port)

    def open(self, model: ServedModel) -> None:
        """Start the engine and take requests for it."""
        self._engine = model.engine
        self._live = self._service.open(model)
        model.engine.start()
        self.health.engine = model.engine
        self.metrics.engine.door = model.engine

    async def drain(self, grace_seconds: float) -> None:
        """Say NOT_SERVING, go on for the grace, refuse what is new, finish the rest or abort it."""
        self.health.is_draining = self.metrics.engine.is_draining = True
        await self.health.refresh()
        if self._engine is None or self._live is None:
            return
        logger.info("draining grace_seconds=%s", grace_seconds)
        await asyncio.sleep(grace_seconds)
        self._engine.drain()
        if not await self._idle_within(self._live, self._config.drain_seconds):
            self._live.close("the server is shutting down; send the request to another replica")
            await self._idle_within(self._live, ABORT_SECONDS)

    async def fail(self, message: str) -> None:
        """End all streams because the engine has died."""
        await self.health.refresh()
        if self._live is not None:
            self._live.fail_all(message)
            await self._idle_within(self._live, ABORT_SECONDS)

    async def stop(self) -> None:
        """Close both ports and end the engine's thread; what still runs is cut."""
        if self._grpc is not None:
            await self._grpc.stop(None)
        if self._http is not None:
            await asyncio.to_thread(self._http.close)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop, ABORT_SECONDS)
        self._service.close()

    def _open_metrics(self) -> None:
        config = self._config
        try:
            self._http = MetricsServer(
                config.host, config.metrics_port, self.metrics.registry, self.health
            )
        except OSError as error:
            raise _port_unavailable("metrics_port", config.host, config.metrics_port) from error
        self.metrics_port = self._http.port

    @staticmethod
    async def _idle_within(live: LiveRequests, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not live.is_idle and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        return live.is_idle


async def serve(config: ServeConfig, model_name: str, load: LoadModel) -> int:
    """Run a server until SIGTERM, SIGINT or the engine's death, and return the exit status.

    0 after a drain, 1 when the engine died or a second signal cut the drain short. `load` runs on a thread of
    its own; SIGTERM while it loads ends at once. Raises UsageError when a port cannot be had, and what
    `load` raises.
    """
    app = App(config, model_name)
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    died = asyncio.create_task(app.health.watch())
    try:
        await app.start()
        loading = _on_daemon_thread(lambda: load(app.metrics.step_done))
        first = await _first(loading, signals.get())
        if not isinstance(first, ServedModel):
            return EXIT_OK
        app.open(first)
        first = await _first(died, signals.get())
        if isinstance(first, str):
            await app.fail(first)
            return EXIT_FAILED
        grace_seconds = config.drain_grace_seconds if first is signal.SIGTERM else 0.0
        cut = await _first(app.drain(grace_seconds), signals.get(), died)
        if isinstance(cut, str):
            await app.fail(cut)
        return EXIT_OK if cut is None else EXIT_FAILED
    finally:
        died.cancel()
        await app.stop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def options(config: ServeConfig) -> list[tuple[str, int]]:
    """Return gRPC's channel arguments.

    Pings from clients are never answered with GOAWAY: many clients ping silent connections every 10 to 30
    seconds. gRPC ignores `grpc.http2.min_recv_ping_interval_without_data_ms` without a word, so
    max_ping_strikes is the argument that works.
    """
    found = [
        ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share it
        ("grpc.keepalive_time_ms", round(config.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # answers are bounded by the context
        ("grpc.max_concurrent_streams", 4096),
    ]
    if config.max_connection_age_seconds:
        # Calls that run when the age is reached may finish: gRPC's grace has no end by default.
        age_ms = round(config.max_connection_age_seconds * 1000)
        found.append(("grpc.max_connection_age_ms", age_ms))
    return found


def _port_unavailable(field: str, host: str, port: int) -> UsageError:
    return UsageError(
        f"cannot listen on {host}:{port}: it is in use, or not an address of this machine. "
        f"Stop whatever has it or choose another ({field}; 0 takes a free one)."
    )


def _on_daemon_thread(work: Callable[[], ServedModel]) -> asyncio.Future[ServedModel]:
    """Run work that nothing waits for when the process ends, unlike the executor's."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ServedModel] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.cancelled():
            outcome()

    def run() -> None:
        try:
            outcome = partial(future.set_result, work())
        except Exception as error:
            outcome = partial(future.set_exception, error)
        # The loop is closed when a signal ended the process while it loaded.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=LOAD_THREAD, daemon=True).start()
    return future


async def _first(*awaitables: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> Any:
    """Return the result of whichever ends first; coroutines that lose are cancelled."""
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, given in zip(tasks, awaitables, strict=True):
        if task in pending and task is not given:
            task.cancel()
    return done.pop().result()
