"""The plain HTTP port: /metrics for Prometheus, /healthz and /readyz for probes that speak no gRPC."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from headway.server.health import Health

logger = logging.getLogger(__name__)

IDLE_SECONDS = 10.0
"""How long a connection may say nothing: each holds a thread."""


class MetricsServer:
    """Serves on threads of its own, so that a busy event loop cannot hide its state."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        """Bind the port; OSError when it cannot be had."""
        kind = _ThreadedServer6 if ":" in host else _ThreadedServer
        app = make_app(registry, health)
        self._server = make_server(host.strip("[]"), port, app, kind, _SilentHandler)
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def make_app(registry: CollectorRegistry, health: Health) -> Callable[..., Iterable[bytes]]:
    """Return the WSGI application of the three paths."""
    metrics_app: Any = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                body: Iterable[bytes] = metrics_app(environ, start_response)
                return body
            case "/healthz":
                return _answer(start_response, health.is_alive)
            case "/readyz":
                return _answer(start_response, health.is_ready)
            case _:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [b"not found; try /metrics, /healthz or /readyz\n"]

    return app


def _answer(start_response: Callable[..., Any], is_well: bool) -> list[bytes]:
    status = "200 OK" if is_well else "503 Service Unavailable"
    start_response(status, [("Content-Type", "text/plain")])
    return [b"ok\n" if is_well else b"not serving\n"]


class _ThreadedServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # with 5, a burst of connections makes probes wait for seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep clients that leave or say nothing from writing tracebacks to stderr."""
        logger.debug("client=%s was not answered", client_address, exc_info=True)


class _ThreadedServer6(_ThreadedServer):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    timeout = IDLE_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Keep scrapes and probes out of the log."""
