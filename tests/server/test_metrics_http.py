"""The metrics port against clients that do not speak HTTP."""

import socket
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from headway.server import metrics_http
from headway.server.health import Health
from headway.server.metrics_http import MetricsServer


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(metrics_http._SilentHandler, "timeout", 0.05)
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), Health(1.0))
    yield server.port
    server.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /met", b"\xff\0" * 99, b"GET /metrics HTTP/1.0\r\nA: b\r\n"]
)
def test_a_client_that_stops_talking_is_hung_up_on_without_a_word(
    sent: bytes, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(sent)
        assert client.recv(100) == b""
    assert capfd.readouterr().err == ""
