"""The requests that the engine works on for clients, from submit to the last output.

Lives on the event loop, except for `_deliver`, which the engine's thread calls.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from headway.engine.errors import EngineStopped, InvalidRequest, Overloaded, Violation
from headway.engine.request import Finish, FinishReason, Output, Request, Timing
from headway.server.convert import Generation
from headway.server.detokenizer import TokenBytes
from headway.server.engine_door import EngineDoor
from headway.server.metrics import Metrics
from headway.server.stream import Stream

logger = logging.getLogger(__name__)


class LiveRequests:
    """Submits requests, hands their outputs to whoever reads them, and aborts what nobody reads."""

    def __init__(self, engine: EngineDoor, token_bytes: TokenBytes, metrics: Metrics) -> None:
        self._engine = engine
        self._token_bytes = token_bytes
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Stream] = {}  # by the engine's id
        self._requests: dict[str, Request] = {}  # by the engine's id
        self._generations: dict[str, Generation] = {}  # by the client's id
        self._inbox: deque[Output] = deque()
        self._is_awake = False
        self._num_calls = 0
        self._closing = ""

    @property
    def is_idle(self) -> bool:
        """Whether the engine has nothing left to do and no call has anything left to read."""
        return not self._generations and not self._num_calls

    @contextmanager
    def submitted(self, generation: Generation) -> Iterator[Stream]:
        """Submit all requests of a generation, and abort on the way out those that have not ended."""
        if generation.request_id in self._generations:
            raise InvalidRequest(
                Violation(
                    "request_id",
                    f"{generation.request_id!r} is in use by a request that has not ended. "
                    "Choose another or leave it out.",
                )
            )
        stream = Stream(generation, self._token_bytes)
        self._num_calls += 1
        try:
            for request in generation.requests:
                self._submit(request, stream)
            yield stream
        finally:
            self._num_calls -= 1
            if stream.num_unfinished:
                self._abort(generation, _reason_to_leave(generation))

    def abort(self, request_id: str) -> None:
        """End a client's request; an unknown id is no error."""
        generation = self._generations.get(request_id)
        if generation is not None:
            self._abort(generation, FinishReason.CANCELLED)

    def close(self, message: str) -> None:
        """Abort every request; the calls end with EngineStopped and this message."""
        self._closing = message
        for request_id in list(self._generations):
            self.abort(request_id)

    def fail_all(self, message: str) -> None:
        """End every stream now: the engine has died and may not have said goodbye."""
        self._empty_inbox()
        for request_id, stream in list(self._streams.items()):
            stream.fail(EngineStopped(message))
            finish = Finish(FinishReason.ERROR, message=message)
            self._end(Output(request_id, Timing(0.0), finish=finish), finish, stream)

    def _submit(self, request: Request, stream: Stream) -> None:
        try:
            self._engine.submit(request, self._deliver)
        except Overloaded as error:
            self._metrics.rejected(error.reason)
            raise
        stream.num_unfinished += 1
        self._streams[request.request_id] = stream
        self._requests[request.request_id] = request
        self._generations[stream.generation.request_id] = stream.generation

    def _abort(self, generation: Generation, reason: FinishReason) -> None:
        for request in generation.requests:
            if request.request_id in self._streams:
                self._engine.abort(request.request_id, reason)

    def _deliver(self, output: Output) -> None:
        """Pass an output to the event loop, waking it once for all that one step brings."""
        self._inbox.append(output)
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon_threadsafe(self._empty_inbox)

    def _empty_inbox(self) -> None:
        # Cleared before the inbox is read: an output that comes later wakes the loop again.
        self._is_awake = False
        while self._inbox:
            output = self._inbox.popleft()
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._hand_on(output, stream)

    def _hand_on(self, output: Output, stream: Stream) -> None:
        try:
            answer = stream.read(output)
        except Exception as error:
            # A fault in reading one answer may not reach the others of this step.
            logger.exception("request_id=%s cannot be read", output.request_id)
            stream.fail(error)
            self._engine.abort(output.request_id, FinishReason.ERROR)
            if output.finish is not None:
                self._end(output, replace(output.finish, reason=FinishReason.ERROR), stream)
            return
        self._metrics.output_arrived(output)
        if answer.finish is not None:
            self._end(output, answer.finish, stream)
        elif answer.found_stop:
            self._engine.abort(output.request_id, FinishReason.STOP_STRING)

    def _end(self, output: Output, finish: Finish, stream: Stream) -> None:
        """Count an answer's end and forget it; every answer that was submitted comes here once."""
        api, request = stream.generation.api, self._requests[output.request_id]
        answer = stream.answer(output.request_id)
        self._metrics.request_finished(api, request, output.timing, finish, answer.num_new_tokens)
        if answer.num_new_tokens:
            self._metrics.detokenized(answer.detokenize_seconds)
        if self._engine.failure is not None:
            stream.fail(EngineStopped(self._engine.failure))
        elif finish.reason is FinishReason.CANCELLED and self._closing:
            stream.fail(EngineStopped(self._closing))
        self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        stream = self._streams.pop(request_id)
        del self._requests[request_id]
        stream.num_unfinished -= 1
        if not stream.num_unfinished:
            self._generations.pop(stream.generation.request_id, None)


def _reason_to_leave(generation: Generation) -> FinishReason:
    """Tell why a call ends before its answers: its deadline, or else its client."""
    deadline = generation.requests[0].deadline
    is_late = deadline is not None and time.monotonic() >= deadline
    return FinishReason.DEADLINE if is_late else FinishReason.CANCELLED
