"""serve as a process of its own: a signal while the model loads."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[3] / ".src"


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("delay_seconds", [0.0, 0.2, 0.4, 0.6])
def test_sigterm_while_the_model_loads_exits_0(smollm2: Path, delay_seconds: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "headway.server.cli", "serve", "--port=0"),
            *(f"--metrics-port={port}", "--drain-grace-seconds=0"),
        ],
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    try:
        wait_until_alive(port)
        time.sleep(delay_seconds)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def wait_until_alive(port: int) -> None:
    """The ports are bound before the model is loaded."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1)
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError("the server does not come up")
