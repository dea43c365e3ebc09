"""Answers of a model in this process, through the server's own handler but without a socket."""

from collections.abc import AsyncIterator

from headway.protos import text_generation_pb2 as pb
from headway.server.config import ServeConfig
from headway.server.engine_door import ServedModel
from headway.server.metrics import Metrics
from headway.server.service import TextGeneration


class NoDeadline:
    """What the handlers ask of a gRPC context: how much time the client leaves them."""

    def time_remaining(self) -> None:
        """Leave it all."""


async def stream_in_process(
    served: ServedModel, request: pb.GenerateStreamRequest
) -> AsyncIterator[pb.GenerateStreamResponse]:
    """Start the engine, yield the events that a server would send, and stop the engine.

    Raises what the handlers raise: InvalidRequest and other children of HeadwayError.
    """
    config = ServeConfig(max_request_seconds=0)
    service = TextGeneration(config, Metrics(served.engine.model_name))
    served.engine.start()
    service.open(served)
    try:
        async for event in service.GenerateStream(request, NoDeadline()):
            yield event
    finally:
        served.engine.stop(timeout_seconds=5)
