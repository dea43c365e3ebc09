"""EngineLoop: the thread that owns an Engine, and the thread-safe door to it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from headway.engine.engine import Engine
from headway.engine.errors import EngineStopped, InvalidRequest, Overloaded, Violation
from headway.engine.request import Finish, FinishReason, Output, Request, Timing
from headway.engine.stats import EngineSnapshot
from headway.engine.validation import check_request

logger = logging.getLogger(__name__)

Deliver = Callable[[Output], None]
IDLE_TICK_SECONDS = 0.5
"""How often the heartbeat is renewed when there is nothing to compute."""


class EngineLoop:
    """Runs steps while there is work. Every public method may be called from any thread.

    Messages go in through an inbox that is emptied between steps; outputs come out through the
    `deliver` that came with the request, called on the engine thread: it must not block.
    """

    def __init__(self, engine: Engine, model_name: str = "") -> None:
        self.engine = engine
        self.limits = engine.limits
        self.model_name = model_name
        self.last_step_monotonic = time.monotonic()
        """Heartbeat: renewed after every step and while idle."""
        self.failure: str | None = None
        """Why the engine thread died, in one line."""
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._deliver: dict[str, Deliver] = {}
        self._queued: dict[str, int] = {}
        """Prompt tokens of the requests that have not been scheduled yet."""
        self._last_finish = time.monotonic()
        self._seconds_between_finishes = 1.0
        self._draining = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the engine thread runs; the model is warm before it starts."""
        return self._thread.is_alive() and self.failure is None

    @property
    def num_requests(self) -> int:
        """Requests that have not had their last output."""
        return len(self._deliver)

    def snapshot(self) -> EngineSnapshot:
        """The engine's state, for metrics."""
        return self.engine.snapshot()

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Queue a request. Raises InvalidRequest, Overloaded or EngineStopped, and then keeps nothing."""
        check_request(request, self.limits)
        with self._wake:
            self._check_room(request)
            arrived = time.monotonic()
            self._deliver[request.request_id] = deliver
            self._queued[request.request_id] = len(request.prompt_ids)
            self._inbox.append(lambda: self.engine.add(request, arrived))
            self._wake.notify()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request within a step. It still gets its last output; unknown ids are no error."""
        with self._wake:
            if request_id in self._deliver:
                self._inbox.append(lambda: self._hand_out(self.engine.abort(request_id, reason)))
                self._wake.notify()

    def drain(self) -> None:
        """Refuse new requests from now on; those that are here go on."""
        self._draining = True

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End the thread after the step it is in; requests that are left end with CANCELLED."""
        with self._wake:
            self._draining = self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _check_room(self, request: Request) -> None:
        if self.failure or self._draining:
            raise EngineStopped(
                self.failure or "the server is shutting down; send the request to another replica"
            )
        if request.request_id in self._deliver:
            raise InvalidRequest(
                Violation(
                    "request_id",
                    f"{request.request_id!r} is in use by a request that has not ended; "
                    "choose another or leave it out",
                )
            )
        config = self.engine.config
        if len(self._queued) >= config.max_queued_requests:
            raise Overloaded(
                f"{len(self._queued)} requests are waiting, as many as are allowed "
                "(max_queued_requests); try again later",
                reason="requests",
                retry_seconds=self._retry_seconds(),
            )
        tokens = sum(self._queued.values())
        if tokens and tokens + len(request.prompt_ids) > config.max_queued_prompt_tokens:
            raise Overloaded(
                f"{tokens:,} prompt tokens are waiting; {len(request.prompt_ids):,} more would exceed "
                f"{config.max_queued_prompt_tokens:,} (max_queued_prompt_tokens); try again later",
                reason="prompt_tokens",
                retry_seconds=self._retry_seconds(),
            )

    def _retry_seconds(self) -> float:
        """When a place in the queue should be free: the recent time between two finished requests."""
        return min(30.0, max(0.2, self._seconds_between_finishes))

    def _run(self) -> None:
        try:
            while self._take_inbox():
                if self.engine.has_work:
                    self._hand_out(self.engine.step())
                self.last_step_monotonic = time.monotonic()
        except Exception as error:
            logger.exception("the engine thread died")
            self.failure = f"the engine failed: {type(error).__name__}: {error}"
        self._end_all()

    def _take_inbox(self) -> bool:
        """Carry out what callers asked for, waiting for it when idle. False: the thread should end."""
        with self._wake:
            if not self._inbox and not self._stopping and not self.engine.has_work:
                self._wake.wait(IDLE_TICK_SECONDS)
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            message()
        return not self._stopping

    def _hand_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            with self._wake:
                deliver = self._deliver[output.request_id]
                self._queued.pop(output.request_id, None)
                if output.finish is not None:
                    del self._deliver[output.request_id]
                    self._note_finish(output.timing.finished)
            try:
                deliver(output)
            except Exception:
                logger.exception("an output of request %s was not taken", output.request_id)

    def _note_finish(self, now: float) -> None:
        """Keep a moving mean of the time between two finished requests."""
        since = now - self._last_finish
        self._seconds_between_finishes += 0.2 * (since - self._seconds_between_finishes)
        self._last_finish = now

    def _end_all(self) -> None:
        """Give every request that is left its last output; nobody waits for a dead thread."""
        with self._wake:
            self._draining = True
            left, self._deliver = self._deliver, {}
            self._queued.clear()
        reason = FinishReason.ERROR if self.failure else FinishReason.CANCELLED
        finish = Finish(reason, message=self.failure or "the server stopped")
        for request_id, deliver in left.items():
            try:
                deliver(Output(request_id, Timing(0.0, finished=time.monotonic()), finish=finish))
            except Exception:
                logger.exception("the end of request %s was not taken", request_id)
