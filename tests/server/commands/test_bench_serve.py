"""bench serve runs its cases by turns, writes vLLM's keys, and fails where requests do."""

import json
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from headway.engine.errors import ModelLoadError, Overloaded
from headway.engine.request import Request
from headway.server.assembly import ModelSettings
from headway.server.cli import main
from headway.server.client import Client
from headway.server.local import child_server
from loopback import threaded

QUICK = ["--num-prompts=3", "--num-repeats=2", "--max-new-tokens=5", "--ignore-eos"]


def test_cases_take_turns_and_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    flags = [*QUICK, "--max-concurrency", "1", "2", f"--json={path}"]
    with threaded() as server:
        assert main(["bench", "serve", f"--address={server.target}", *flags]) == 0
        asked = server.engine.submitted
    record = json.loads(path.read_text())
    cases = [(case["max_concurrency"], case["speculation"]) for case in record["cases"]]
    assert cases == [(1, False), (1, True), (2, False), (2, True)]
    assert [case["completed"] for case in record["cases"]] == [6] * 4
    assert [case["total_output_tokens"] for case in record["cases"]] == [30] * 4
    assert record["model_id"] == "tiny"
    assert record["config"]["num_repeats"] == 2
    drafts = [request.speculation.enabled for request in asked[2:]]  # after those that warm up
    assert drafts == [*[False] * 3, *[True] * 3] * 4
    assert {request.use_prefix_cache for request in asked} == {False}
    shown = capsys.readouterr().out
    assert "0/6" in shown
    assert "ttft" in shown


def test_an_open_loop_is_one_case(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    flags = [*QUICK, "--request-rate=500", "--drafts=off", f"--json={path}"]
    with threaded() as server:
        assert main(["bench", "serve", f"--address={server.target}", *flags]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    assert (case["max_concurrency"], case["request_rate"]) == (None, 500.0)


def test_failures_are_told_and_fail(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(asked: Request) -> None:
        if asked.sampling.seed == 1:
            raise Overloaded("the queue is full", reason="requests", retry_seconds=1.0)

    flags = [*QUICK, "--max-concurrency=1", "--drafts=on"]
    with threaded(FakeEngine(refuse=refuse)) as server:
        assert main(["bench", "serve", f"--address={server.target}", *flags]) == 1
    said = capsys.readouterr()
    assert "2/6" in said.out
    assert "RESOURCE_EXHAUSTED: the queue is full" in said.err
    assert "2 requests failed" in said.err


def test_time_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-seconds=0.5", "--max-new-tokens=2000", "--ignore-eos", "--num-prompts=1"]
    with threaded(FakeEngine(step_seconds=0.02)) as server:
        assert main(["bench", "serve", f"--address={server.target}", *flags]) == 1
    assert "--max-seconds had passed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--num-prompts=0", "num_prompts is 0"),
        ("--max-concurrency=0", "max_concurrency is (0,)"),
        ("--request-rate=0", "request_rate is 0.0"),
        ("--max-seconds=-1", "max_seconds is -1.0"),
        ("--request-rate=nan", "request_rate is nan"),
    ],
)
def test_settings_are_checked(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", flag])
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_no_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--address=127.0.0.1:1"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_of_its_own(tiny_flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    flags = [*QUICK, "--max-concurrency=2", f"--json={path}", *tiny_flags]
    assert main(["bench", "serve", *flags]) == 0
    off, on = json.loads(path.read_text())["cases"]
    assert off["completed"] == on["completed"] == 6
    assert off["generated_texts"] == on["generated_texts"]


@pytest.mark.slow
def test_the_childs_end() -> None:
    with (
        pytest.raises(ModelLoadError, match="there is no model 'nosuch'"),
        child_server(ModelSettings(model="nosuch")),
    ):
        pass


@pytest.mark.slow
def test_the_child_ends_with_its_parents_interest(tiny_folder: Path) -> None:
    with child_server(ModelSettings(model=str(tiny_folder))) as address, Client(address) as client:
        assert client.model_info(timeout_seconds=5).vocab_size > 0
    with Client(address) as client, pytest.raises(Exception, match="UNAVAILABLE"):
        client.model_info(timeout_seconds=2)
