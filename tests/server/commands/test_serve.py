"""serve, from flags to SIGTERM, in this process; and what keeps it from starting."""

import logging
import os
import re
import signal
import socket
import threading
import time

import pytest

from headway.server.cli import main
from headway.server.client import Client


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    caplog.set_level(logging.INFO, "headway")


def wait_for(caplog: pytest.LogCaptureFixture, pattern: str) -> re.Match[str]:
    """Wait for a line of the log."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if found := re.search(pattern, caplog.text):
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {pattern} in {caplog.text}")


def test_serve_logs_its_config_answers_and_ends_on_sigterm(
    tiny_flags: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[object] = []

    def visit() -> None:
        try:
            address = wait_for(caplog, r"grpc=(127\.0\.0\.1:\d+)")[1]
            wait_for(caplog, "ready=True")
            seen.append(main(["healthcheck", address]))
            with Client(address) as client:
                answer = client.generate(
                    "hello", max_new_tokens=5, temperature=0.0, ignore_eos=True
                )
                seen.append(len(answer.answers[0].token_ids))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=visit)
    thread.start()
    flags = ["--port=0", "--metrics-port=-1", "--drain-grace-seconds=0", "--engine.block-size=8"]
    assert main(["serve", *flags, *tiny_flags]) == 0
    thread.join()
    assert seen == [0, 5]
    assert "engine.block_size=8" in caplog.text
    assert "drain_grace_seconds=0.0" in caplog.text


def test_a_port_in_use_is_one_line_and_exit_code_2(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", f"--port={port}", "--metrics-port=-1", *tiny_flags]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"headway: cannot listen on 127.0.0.1:{port}")


def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port=0", "--metrics-port=-1", "--model=/no/such"]) == 2
    assert re.search("^headway: .*/no/such", capsys.readouterr().err.splitlines()[-1])
