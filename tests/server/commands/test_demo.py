"""demo, end to end: a model on disk, a server on loopback, two equal answers and a table."""

import pytest

from headway.server.cli import main
from headway.server.commands import demo as module
from headway.server.commands.demo import Measured


def test_demo_serves_asks_twice_and_compares(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "demo",
                "--prompt=abcabcabc",
                "--max-new-tokens=60",
                "--engine.no-adaptive-drafts",
                *tiny_flags,
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    rows = {
        line.split("\u2502")[1].strip(): line for line in shown.splitlines() if "\u2502" in line
    }
    plain, fast = rows["off"].split("\u2502"), rows["suffix"].split("\u2502")
    assert plain[2] == fast[2]
    assert float(plain[-2]) == 1.0
    assert float(fast[-2]) > 1.0
    assert "Both answers are the same" in shown
    assert "served at 127.0.0.1:" in shown


def test_answers_that_differ_fail(
    tiny_flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*args: object, is_speculative: bool, **options: object) -> Measured:
        answer = module.pb.Answer(token_ids=[int(is_speculative)])
        return Measured(answer, 1.0, 0.5)

    monkeypatch.setattr(module, "_ask", ask)
    assert main(["demo", *tiny_flags]) == 1
    assert "The two answers differ" in capsys.readouterr().out


def test_demo_without_speculation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--speculation=off"])
    assert stop.value.code == 2
    assert "speculation is off" in capsys.readouterr().err
