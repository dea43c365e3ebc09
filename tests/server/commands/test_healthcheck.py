"""healthcheck against a real gRPC health service, and against nobody."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headway.server.cli import main

STATUS = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    servicer = health.HealthServicer()
    servicer.set("", STATUS.SERVING)
    servicer.set("headway.v1.TextGeneration", STATUS.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("flags", "code", "status"),
    [
        (["--service", ""], 0, "SERVING\n"),
        ([], 1, "NOT_SERVING\n"),
        (["--service", "headway.v2.Nothing"], 1, "SERVICE_UNKNOWN\n"),
    ],
)
def test_status_becomes_an_exit_code(
    address: str, flags: list[str], code: int, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["healthcheck", address, *flags]) == code
    assert capsys.readouterr().out == status


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert main(["healthcheck", address, "--timeout-seconds=0.5"]) == 1
    captured = capsys.readouterr()
    assert address in captured.err
    assert not captured.out
