"""Whatever keeps the native bodies from working, the reference serves and one line says why."""

import functools
import logging
from pathlib import Path

import pytest

from headway.kernels import native
from headway.kernels.cpu import build as build_module
from headway.kernels.cpu.levels import usable_levels
from headway.kernels.native import NativeUnavailable, load_library, start_team

needs_avx2 = pytest.mark.skipif("avx2" not in usable_levels(), reason="this machine lacks AVX2")


@pytest.fixture(autouse=True)
def team_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a build of team.cpp without the kernels, which is fast."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("team.cpp", "team.h"):
        (sources / name).write_bytes((build_module.SOURCES / name).read_bytes())
    monkeypatch.setattr(native, "build", functools.partial(build_module.build, sources=sources))
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def told(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    return record.getMessage()


def compiler_that(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_avx2
def test_auto_takes_the_best_level(
    team_alone: Path, compiler: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    team = start_team("auto", 2)
    assert team is not None
    assert team.num_threads == 2
    assert team.library.level == usable_levels()[-1]
    assert team.library.path.is_relative_to(team_alone / "kernels")
    assert not caplog.records
    team.close()


def test_the_reference_builds_nothing(team_alone: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert start_team("reference", 2) is None
    assert not team_alone.exists()
    assert not caplog.records


@needs_avx2
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "there is no C++ compiler (no-such-compiler)"),
        ("exit 1", "exit code 1"),
        ("[ $1 = --version ] && exit 0; echo 'x.cpp:3: error: odd' >&2; exit 1", "error: odd"),
        ("[ $1 = --version ] && exit 0; while [ $1 != -o ]; do shift; done; : > $2", "too short"),
    ],
    ids=["none", "broken", "error", "result_cannot_be_loaded"],
)
def test_a_build_that_fails_leaves_the_reference(
    script: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler_that(tmp_path, script) if script else "no-such-compiler")
    assert start_team("auto", 2) is None
    message = told(caplog)
    assert message.startswith("kernels=reference, which is slow, because")
    assert reason in message


def test_a_processor_without_avx2_gets_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "usable_levels", list)
    assert start_team("auto", 1) is None
    assert "no x86-64 with AVX2" in told(caplog)


def test_a_level_that_was_asked_for_and_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "usable_levels", lambda: ["avx2"])
    with pytest.raises(NativeUnavailable, match=r"kernels=amx: .* it can run avx2 of avx2, avx512"):
        start_team("amx", 1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match=r"kernels=avx2: there is no C\+\+ compiler"):
        start_team("avx2", 1)


@needs_avx2
def test_a_compiler_too_old_for_the_best_level_serves_the_next(
    tmp_path: Path,
    compiler: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = (
        f'case "$*" in *avx512*) echo unknown option >&2; exit 1;; esac; exec {compiler[0]} "$@"'
    )
    monkeypatch.setenv("CXX", compiler_that(tmp_path, script))
    monkeypatch.setattr(native, "usable_levels", lambda: ["avx2", "avx512"])
    assert load_library("auto").level == "avx2"
    assert "unknown option" in told(caplog)


@needs_avx2
def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path,
    compiler: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    team = start_team("auto", 2)
    assert team is not None
    assert "kernels are compiled at each start, because" in told(caplog)
    assert not team.library.path.exists()
    team.close()


@needs_avx2
def test_a_damaged_library_is_made_again(
    compiler: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = load_library("avx2").path
    other = path.with_name("loaded.so")
    path.rename(other)  # since it is loaded, and writing to it would change it in memory
    path.write_bytes(other.read_bytes()[:5000])
    assert load_library("avx2").path == path
    assert not caplog.records


def test_too_many_threads_leave_the_reference(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("2 threads cannot be started")

    monkeypatch.setattr(native, "Team", refuse)
    monkeypatch.setattr(native, "load_library", lambda choice, progress: None)
    assert start_team("auto", 2) is None
    assert "2 threads cannot be started" in told(caplog)
