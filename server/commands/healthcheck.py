"""`headway healthcheck`: the probe of containers. Imports no model code, so that it is fast."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headway.server.settings import POSITIONAL


@dataclass(frozen=True, slots=True)
class HealthcheckConfig:
    """Ask a server whether it is serving.

    Exit code 0 means that it is, 1 that it is not or does not answer.
    """

    address: Annotated[str, POSITIONAL] = "127.0.0.1:50051"
    """host:port of the server."""
    service: str = "headway.v1.TextGeneration"
    """Service to ask about: this one serves once its model is loaded; "" is the process itself."""
    timeout_seconds: float = 2.0
    """How long to wait for the answer."""


def healthcheck(config: HealthcheckConfig) -> int:
    """Print the status that the server gives and return the exit code."""
    try:
        status = _ask(config)
    except grpc.RpcError as error:
        # A failed call is a Call too, which the types do not say.
        call: Any = error
        if call.code() is not grpc.StatusCode.NOT_FOUND:
            print(f"{config.address}: {call.code().name}: {call.details()}", file=sys.stderr)
            return 1
        status = "SERVICE_UNKNOWN"
    print(status)
    return 0 if status == "SERVING" else 1


def _ask(config: HealthcheckConfig) -> str:
    # No proxy: a probe asks the machine that it names.
    with grpc.insecure_channel(config.address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types leave the methods out
        response = stub.Check(
            health_pb2.HealthCheckRequest(service=config.service), timeout=config.timeout_seconds
        )
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name
