"""The table of commands: help, near names, exit codes, and what is imported when."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from headway.engine.errors import HeadwayError, UsageError
from headway.server import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _quiet_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the process's logging as it is."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(logging.getLogger("headway"), "level", logging.NOTSET)


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == shown
    assert all(f"  {name} " in shown for name in cli.COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80


def test_a_group_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 2
    assert cli.main(["models", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "models pull" in shown
    assert "doctor" not in shown


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["sevre"], "near ones are: serve"),
        (["models", "pul"], "models pull"),
        (["bench", "engin"], "bench engine"),
        (["zzz"], "headway --help lists them"),
    ],
)
def test_unknown_commands_name_near_ones(
    arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert near in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headway ")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_each_command_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        cli.main([*name.split(), "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert cli.COMMANDS[name].summary in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_summary_is_the_first_line_of_the_config(name: str) -> None:
    config_type = cli.config_type(cli.load(cli.COMMANDS[name]))
    assert (config_type.__doc__ or "").splitlines()[0] == cli.COMMANDS[name].summary


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], ["torch", "transformers", "grpc", "tyro", "rich"]),
        (["healthcheck", "127.0.0.1:1"], ["torch", "transformers", "numpy"]),
    ],
)
def test_light_commands_import_little(arguments: list[str], unwanted: list[str]) -> None:
    script = (
        "import sys; from headway.server.cli import main\n"
        f"main({arguments!r})\n"
        f"print('loaded:', [name for name in {unwanted!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / ".src")},
    )
    assert done.stdout.endswith("loaded: []\n")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UsageError("a file is wrong"), 2, "headway: a file is wrong\n"),
        (HeadwayError("no room"), 2, "headway: no room\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(
    raised: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> int:
        raise raised

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_leaves_is_no_error() -> None:
    script = "from headway.server.cli import main; raise SystemExit(main(['--help']))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT / ".src")},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_headway_log_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_LOG", "loud")
    assert cli.main(["doctor"]) == 2
    assert "debug, info, warning, error are allowed" in capsys.readouterr().err


def test_headway_log_sets_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_LOG", "DEBUG")
    cli.set_up_logging("warning")
    assert logging.getLogger("headway").level == logging.DEBUG
    monkeypatch.delenv("HEADWAY_LOG")
    cli.set_up_logging("warning")
    assert logging.getLogger("headway").level == logging.WARNING
