"""Whether this process is alive and whether it serves, for gRPC's health service and HTTP probes."""

import asyncio
import logging
import time
from collections import defaultdict

from grpc_health.v1 import health, health_pb2

from headway.server.engine_door import EngineDoor

logger = logging.getLogger(__name__)

SERVICE_NAME = "headway.v1.TextGeneration"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WATCH_SECONDS = 0.1


class Health:
    """Two answers: "" is a process whose engine ticks, the service is a model that takes requests.

    A process that loads its model is alive and not ready. One that drains, or whose engine died or
    stalled, is neither.
    """

    def __init__(self, max_stall_seconds: float) -> None:
        self.servicer = _HealthServicer()
        self.is_alive = True
        self.is_ready = False
        self.is_draining = False
        self.engine: EngineDoor | None = None
        """Set once the model is loaded."""
        self._max_stall_seconds = max_stall_seconds

    async def refresh(self) -> None:
        """Look at the engine and tell whoever watches when something changed."""
        alive, ready = self._judge()
        if (alive, ready) != (self.is_alive, self.is_ready):
            logger.info("alive=%s ready=%s", alive, ready)
        self.is_alive, self.is_ready = alive, ready
        await self.servicer.set("", SERVING if alive else NOT_SERVING)
        await self.servicer.set(SERVICE_NAME, SERVING if ready else NOT_SERVING)

    async def watch(self) -> str:
        """Keep the answers fresh until the engine dies, and return what killed it."""
        while self.engine is None or self.engine.failure is None:
            await self.refresh()
            await asyncio.sleep(WATCH_SECONDS)
        await self.refresh()
        return self.engine.failure

    def _judge(self) -> tuple[bool, bool]:
        engine = self.engine
        if self.is_draining:
            return False, False
        if engine is None:
            return True, False
        idle_seconds = time.monotonic() - engine.last_step_monotonic
        is_stalled = engine.num_requests > 0 and idle_seconds > self._max_stall_seconds
        alive = engine.failure is None and not is_stalled
        return alive, alive and engine.ready


class _HealthServicer(health.aio.HealthServicer):
    def __init__(self) -> None:
        super().__init__()
        self._server_watchers = _KeptConditions(asyncio.Condition)


class _KeptConditions(defaultdict[str, asyncio.Condition]):
    """Keeps the condition of a known service when one of its watchers leaves.

    The health package deletes it then, and the other watchers of the service never hear of a change.
    """

    def __delitem__(self, service: str) -> None:
        if service not in ("", SERVICE_NAME):
            super().__delitem__(service)
