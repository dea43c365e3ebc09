"""The one interceptor that every call passes: it names requests, counts calls and maps errors.

Knows no handler; errors.py says which status an error is.
"""

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from headway.engine.errors import HeadwayError, InvalidRequest, Violation
from headway.server.convert import to_client_fields
from headway.server.errors import to_rpc_error
from headway.server.metrics import Metrics

logger = logging.getLogger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Names each request of our services, counts its call, and maps what it raises to a status."""

    def __init__(self, metrics: Metrics, package: str) -> None:
        self._metrics = metrics
        self._prefix = f"/{package}."

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(self._prefix):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(method, handler.unary_stream),
                _reader(handler.request_deserializer),
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, handler.unary_unary),
            _reader(handler.request_deserializer),
            handler.response_serializer,
        )

    def _unary(self, method: str, behavior: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            held = [request]
            del request
            async with self._watched(method, "unary", held, context):
                response = await behavior(held[0], context)
                self._metrics.message_sent(method, "unary")
                return response

        return call

    def _streaming(self, method: str, behavior: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            held = [request]
            del request
            async with (
                self._watched(method, "server_stream", held, context),
                aclosing(behavior(held[0], context)) as responses,
            ):
                async for response in responses:
                    yield response
                    self._metrics.message_sent(method, "server_stream")

        return call

    @asynccontextmanager
    async def _watched(
        self, method: str, kind: str, held: list[Any], context: Any
    ) -> AsyncIterator[None]:
        """Run a call: count it, time it, and end it with the right status when it raises.

        `held` has the request. gRPC keeps the error of an aborted call in a cycle with the frames that it
        passed, so a large request would stay until some later garbage collection: all lets go of it
        before.
        """
        request = held[0]
        request_id = _name(request)
        started = time.perf_counter()
        self._metrics.rpc_started(method, kind)
        code = grpc.StatusCode.OK
        try:
            if isinstance(request, DecodeError):
                message = f"is not the message that the method takes: {request}. Check the client."
                raise InvalidRequest(Violation("request", message))
            yield
        except (asyncio.CancelledError, GeneratorExit):
            code = _code_of_leaving(context)
            raise
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, InvalidRequest) and isinstance(request, Message):
                error = to_client_fields(error, request)
            elif not isinstance(error, HeadwayError):
                logger.exception("request_id=%s method=%s failed", request_id, method)
            shown = to_rpc_error(error, request_id)
            code = shown.code
            held.clear()
            del request
            await context.abort(code, shown.message, shown.trailers())
        finally:
            self._metrics.rpc_handled(method, kind, code, time.perf_counter() - started)


def _reader(deserialize: Callable[[bytes], Message]) -> Callable[[bytes], Message | DecodeError]:
    """Hand on bytes that are no message as the error: gRPC would answer UNKNOWN and log a traceback."""

    def read(data: bytes) -> Message | DecodeError:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return read


def _name(request: Any) -> str:
    """Return the request's id; one that its client did not name gets a random one."""
    if getattr(request, "request_id", None):
        return str(request.request_id)
    name = uuid.uuid4().hex
    if hasattr(request, "request_id"):
        request.request_id = name
    return name


def _code_of_leaving(context: Any) -> grpc.StatusCode:
    remaining = context.time_remaining()
    is_late = remaining is not None and remaining <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
