"""A folder enters the cache whole, once, and a damaged one is made again."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.kernels.cache import cache_folder, make_folder


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", "/somewhere/else")
    assert cache_folder() == Path("/somewhere/else")
    monkeypatch.delenv("HEADWAY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/headway")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "headway"


def test_a_folder_is_made_once_unless_it_is_damaged(tmp_path: Path) -> None:
    made = []

    def fill(folder: Path) -> None:
        time.sleep(0.01)
        (folder / "text").write_text("whole")
        made.append(folder)

    def is_whole(folder: Path) -> bool:
        text = folder / "text"
        return text.is_file() and text.read_text() == "whole"

    target = tmp_path / "deep" / "target"

    def make_from_four() -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: make_folder(target, fill, is_whole), range(4)))

    make_from_four()
    assert len(made) == 1
    (target / "text").write_text("half")
    (target / "more").write_text("")
    make_from_four()
    assert len(made) == 2
    assert sorted(path.name for path in target.iterdir()) == ["text"]
    assert sorted(path.name for path in target.parent.iterdir()) == [".target.lock", "target"]


def test_a_failure_leaves_nothing_and_what_was_left_is_removed(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError

    (tmp_path / ".target.partial").mkdir()
    (tmp_path / ".target.partial" / "old").write_text("")
    with pytest.raises(ValueError):  # noqa: PT011 # raised above
        make_folder(tmp_path / "target", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".target.lock"]
