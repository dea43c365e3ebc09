"""Errors to gRPC status and back; interceptor.py and client.py are the two ends.

The only place that knows google.rpc details: BadRequest, ErrorInfo, RequestInfo, ResourceInfo, RetryInfo.
"""

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import (  # type: ignore[import-untyped]  # published without types
    error_details_pb2,
    status_pb2,
)

from headway.engine.errors import (
    EngineStopped,
    HeadwayError,
    InvalidRequest,
    Overloaded,
    UnknownModel,
    Violation,
)

DOMAIN = "headway"
MAX_VIOLATIONS = 16
MAX_MESSAGE_CHARS = 1000
"""With the violations, keeps the status below the 8 KiB that gRPC allows for trailers."""
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"


class AnswerFailed(HeadwayError):
    """The engine could not go on with one request; the message says why."""


class DeadlinePassed(HeadwayError):
    """The client's deadline came before the end of the answer."""


@dataclass(frozen=True, slots=True)
class RpcError:
    """What a client gets to see of an error."""

    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...]
    retry_seconds: float | None = None

    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the trailing metadata: the status with its details, and when to try again."""
        number: int = self.code.value[0]
        status = status_pb2.Status(code=number, message=self.message)
        for detail in self.details:
            status.details.add().Pack(detail)
        trailers: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
        if self.retry_seconds is not None:
            trailers.append((PUSHBACK_KEY, str(max(1, round(self.retry_seconds * 1000)))))
        return tuple(trailers)


def to_rpc_error(error: Exception, request_id: str) -> RpcError:
    """Map an error class to its gRPC status. An unforeseen one shows nothing but the request's id."""
    code, reason, extra = grpc.StatusCode.INTERNAL, "INTERNAL", []
    message, retry_seconds = str(error), None
    match error:
        case InvalidRequest():
            code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"
            extra = [_bad_request(error)]
        case UnknownModel():
            code, reason = grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"
            extra = [error_details_pb2.ResourceInfo(resource_type="model")]
        case Overloaded():
            code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, f"QUEUE_FULL_{error.reason.upper()}"
            retry_seconds = error.retry_seconds
            extra = [error_details_pb2.RetryInfo(retry_delay=_duration(retry_seconds))]
        case EngineStopped():
            code, reason = grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED"
        case DeadlinePassed():
            code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_PASSED"
        case AnswerFailed():
            reason = "ANSWER_FAILED"
        case _:
            message = f"internal error; the server's log has it under request_id={request_id}"
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    return RpcError(
        code,
        message,
        (
            error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN),
            error_details_pb2.RequestInfo(request_id=request_id),
            *extra,
        ),
        retry_seconds,
    )


def from_rpc_error(error: grpc.RpcError) -> Exception:
    """Turn a call's failure back into the error that the server raised; others stay as they are."""
    # Every failed grpc call is a Call too, which the stubs do not say.
    call: Any = error
    details = _details(call)
    message = call.details() or ""
    info = details.get("ErrorInfo", error_details_pb2.ErrorInfo())
    if info.domain != DOMAIN:
        return error
    match call.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            found = details["BadRequest"].field_violations
            return InvalidRequest(*(Violation(v.field, v.description) for v in found))
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModel(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            delay = details["RetryInfo"].retry_delay
            return Overloaded(
                message,
                reason=info.reason.removeprefix("QUEUE_FULL_").lower(),
                retry_seconds=delay.seconds + delay.nanos / 1e9,
            )
        case grpc.StatusCode.UNAVAILABLE:
            return EngineStopped(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return error  # nearly always gRPC itself is first to notice; callers see one error
        case _:
            return AnswerFailed(message)


def _bad_request(error: InvalidRequest) -> error_details_pb2.BadRequest:
    violations = error.violations[:MAX_VIOLATIONS]
    room = MAX_MESSAGE_CHARS * 3 // max(1, len(violations))
    details = error_details_pb2.BadRequest()
    for violation in violations:
        details.field_violations.add(
            field=violation.field[:128], description=violation.message[:room]
        )
    return details


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(round(seconds * 1000))
    return duration


def _details(call: Any) -> dict[str, Any]:
    """Return the google.rpc details of a failed call by message name."""
    status = status_pb2.Status()
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY:
            status.ParseFromString(value)
    kinds = (
        error_details_pb2.BadRequest,
        error_details_pb2.ErrorInfo,
        error_details_pb2.RetryInfo,
    )
    found: dict[str, Any] = {}
    for detail in status.details:
        for kind in kinds:
            message = kind()
            if detail.Unpack(message):
                found[kind.__name__] = message
    return found
