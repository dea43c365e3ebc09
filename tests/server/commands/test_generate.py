"""generate in process and against a server: text, JSON, figures, and errors in one line."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.engine.config import EngineConfig
from headway.server.assembly import ModelSettings, assemble
from headway.server.cli import main
from headway.server.local import local_server

SHORT = ["--max-new-tokens=12", "--temperature=0"]


@pytest.fixture(scope="module")
def address(tiny_folder: Path) -> Iterator[str]:
    engine = EngineConfig(num_threads=1, kv_cache_bytes=1_000_000, adaptive_drafts=False)
    with local_server(assemble(ModelSettings(str(tiny_folder), engine=engine))) as address:
        yield address


def test_in_process_says_what_a_server_says(
    address: str, tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello", *SHORT, *tiny_flags]) == 0
    here = capsys.readouterr()
    assert main(["generate", "hello", *SHORT, "--server", address]) == 0
    there = capsys.readouterr()
    assert here.out == there.out
    assert len(here.out) > 1
    assert "num_new_tokens=12" in there.err
    assert "finish_reason=length" in there.err


def test_speculation_changes_no_token(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for flags in ([], ["--speculation=off"], ["--max-draft-tokens=1"]):
        command = ["generate", "abcabcabc", "--json", "--max-new-tokens=60", "--temperature=0"]
        assert main([*command, "--server", address, *flags]) == 0
        answers.append(json.loads(capsys.readouterr().out)["answers"][0])
    assert answers[0]["token_ids"] == answers[1]["token_ids"] == answers[2]["token_ids"]
    assert answers[0]["speculation"]["num_drafted"] > 0
    assert "num_drafted" not in answers[1]["speculation"]


def test_json_has_every_answer(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--n=2",
        "--seed=7",
        "--num-logprobs=2",
        "--json",
        "--max-new-tokens=3",
        "--ignore-eos",
    ]
    assert main(["generate", "hello", "--server", address, *flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["seed"] == "7"
    assert shown["seconds"] > 0
    assert [len(answer["token_ids"]) for answer in shown["answers"]] == [3, 3]
    assert len(shown["answers"][0]["logprobs"][0]["top"]) == 2


def test_several_answers_for_people(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--server", address, "--n=2", *SHORT]) == 0
    shown = capsys.readouterr()
    assert "--- answer 0 ---\n" in shown.out
    assert "--- answer 1 ---\n" in shown.out
    assert shown.err.count("num_new_tokens=") == 2


@pytest.mark.parametrize(
    ("flags", "num_prompt_tokens"),
    [
        (["--raw"], len("hello")),
        ([], len("[user] hello\n[assistant] ")),
        (["--system=be"], len("[system] be\n[user] hello\n[assistant] ")),
    ],
)
def test_prompt_from_stdin_raw_or_as_a_chat(
    address: str,
    flags: list[str],
    num_prompt_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["generate", "--server", address, "--json", *SHORT, *flags]) == 0
    usage = json.loads(capsys.readouterr().out)["answers"][0]["usage"]
    assert usage["num_prompt_tokens"] == num_prompt_tokens


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature=0.0001"], "sampling.temperature"),
        (["--top-k=-3"], "sampling.top_k"),
        (["--n=100"], "n: is 100"),
        (["--logit-bias", "9999", "1"], "sampling.logit_bias"),
    ],
)
def test_bad_values_are_named(
    address: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello", "--server", address, *flags]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_flags_reach_the_engine(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--logit-bias", "70", "100", "--stop-token-ids=71", "--temperature=0"]
    command = ["generate", "hello", "--server", address, "--json", "--max-new-tokens=4"]
    assert main([*command, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["token_ids"] == [70] * 4


@pytest.mark.parametrize(
    "flags", [["\udcff"], ["x", "--system=\udcff"], ["x", "--stop-strings=\udcff"]]
)
def test_bytes_that_are_no_text_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--server=127.0.0.1:1", *flags]) == 2
    assert "a flag is not UTF-8: " in capsys.readouterr().err


def test_stdin_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert main(["generate", "--server=127.0.0.1:1"]) == 2
    assert "is not UTF-8: " in capsys.readouterr().err


def test_a_terminal_that_cannot_show_the_text_gets_what_it_can(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    flags = ["--logit-bias", "200", "100", "--max-new-tokens=2", "--temperature=0"]
    assert main(["generate", "hello", "--server", address, *flags]) == 0
    sys.stdout.flush()
    assert written.getvalue() == b"??\n"


def test_system_and_raw_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "hello", "--raw", "--system=x"])
    assert stop.value.code == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_nobody_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--server=127.0.0.1:1", "--timeout-seconds=5"]) == 1
    assert "127.0.0.1:1: UNAVAILABLE" in capsys.readouterr().err


def test_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["bogus", "cuda:99"])
def test_a_device_that_is_none(
    device: str, tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello", *tiny_flags, "--engine.device", device]) == 2
    assert capsys.readouterr().err.startswith("headway: ")


@pytest.mark.parametrize(
    "flags", [["--heads", "x"], ["--engine.block-size=8"], ["--speculation=suffix"]]
)
def test_what_only_the_server_decides_is_refused_beside_it(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "hello", "--server", "127.0.0.1:1", *flags])
    assert stop.value.code == 2
    assert "with --server leave them out" in " ".join(capsys.readouterr().err.split())


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--server", "127.0.0.1:1"]) == 1
    assert "is `headway serve` running at 127.0.0.1:1?" in capsys.readouterr().err
