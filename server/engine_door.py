"""What the server needs of an engine: a door that plain messages cross.

A protocol, so that the engine may be a thread, a process or a test's script.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headway.engine.request import FinishReason, Output, Request
from headway.engine.stats import EngineSnapshot
from headway.engine.validation import Limits


class EngineDoor(Protocol):
    """A running engine, as seen from the event loop."""

    @property
    def limits(self) -> Limits: ...
    @property
    def model_name(self) -> str: ...
    @property
    def ready(self) -> bool:
        """Whether the model is loaded and warm."""
        ...

    @property
    def failure(self) -> str | None:
        """What killed the engine; None while it lives."""
        ...

    @property
    def last_step_monotonic(self) -> float:
        """time.monotonic() of the newest step."""
        ...

    @property
    def num_requests(self) -> int:
        """Queued and running requests."""
        ...

    def start(self) -> None:
        """Begin to work; `ready` follows."""
        ...

    def stop(self, timeout_seconds: float) -> None:
        """End the engine's thread."""
        ...

    def submit(self, request: Request, deliver: Callable[[Output], None]) -> None:
        """Take a request; `deliver` is called on the engine's thread with every Output.

        Raises InvalidRequest, Overloaded or EngineStopped.
        """
        ...

    def abort(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request; it still gets its last Output. Unknown ids are ignored."""
        ...

    def drain(self) -> None:
        """Refuse new requests with EngineStopped and finish the rest."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Return the numbers that metrics show."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine and the tokenizer of its model."""

    engine: EngineDoor
    tokenizer: Any
