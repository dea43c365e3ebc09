"""The errors that Headway raises on purpose, and what each one means to a caller.

HeadwayError
  InvalidRequest   the request cannot be served as it is; sending it again will not help
  UnknownModel     the request names a model that this server does not serve
  Overloaded       there is no room now; try again after `retry_seconds`
  EngineStopped    the engine is draining or has died; another replica may serve
  ModelLoadError   a model cannot be found, read or held in memory; start-up fails
  UsageError       a command cannot do what it was asked: flags, settings, files, ports

server/errors.py maps them to gRPC status and adds the two ways in which a call itself ends early;
server/cli.py makes any of them one line and exit code 2. Any other exception is a bug of ours.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One bad field: its name as in the proto, and one line for the person who set it."""

    field: str
    message: str


class HeadwayError(Exception):
    """Parent of the errors that Headway raises on purpose."""


class InvalidRequest(HeadwayError):
    """The request cannot be served; `violations` names each bad field."""

    def __init__(self, *violations: Violation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.message}" for v in violations))
        self.violations = violations


class UnknownModel(HeadwayError):
    """The request names a model that is not served here."""


class Overloaded(HeadwayError):
    """The queue is full. `reason` is a metric label, `retry_seconds` a hint for the client."""

    def __init__(self, message: str, *, reason: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_seconds = retry_seconds


class EngineStopped(HeadwayError):
    """The engine takes no requests: it is draining, or its thread has died."""


class ModelLoadError(HeadwayError):
    """A model cannot be found, read, converted or held in memory."""


class UsageError(HeadwayError):
    """A command cannot do what it was asked, by flags, settings files, data files or ports."""


def first_line(error: Exception) -> str:
    """Return the first line of what another library's error says, as a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".") + "."
