"""models pull and models list show what the store says."""

import json
from pathlib import Path

import pytest

from headway.engine.models import store
from headway.server.cli import main


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_list_as_json(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--json"]) == 0
    listings = {listing["name"]: listing for listing in json.loads(capsys.readouterr().out)}
    assert listings["smollm2-135m"]["licence"] == "Apache-2.0"
    assert listings["smollm2-135m"]["state"] == "not pulled"
    assert listings["smollm2-135m"]["path"].startswith(str(empty_cache))


def test_list_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


def test_pull_prints_the_path_and_draws_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pull(name: str, progress: store.Progress) -> Path:
        progress("download", 5_000_000, 10_000_000)
        progress("download", 10_000_000, 10_000_000)
        return Path("/models") / name

    monkeypatch.setattr(store, "pull", pull)
    assert main(["models", "pull"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "/models/smollm2-135m\n"
    assert "download" in captured.err
    assert "10.0/10.0 MB" in captured.err


def test_pull_of_an_unknown_model_names_those_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "smollm"]) == 2
    captured = capsys.readouterr()
    assert "smollm2-135m" in captured.err
    assert captured.err.count("\n") == 1
