"""A library is compiled once and whole, and what goes wrong is told in the compiler's words."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway.kernels.cpu.build import FLAGS, SOURCES, BuildError, build, find_compiler
from headway.kernels.cpu.levels import LEVELS, LevelName
from headway.kernels.cpu.library import Library

LEVEL: LevelName = "avx2"


def fake_compiler(path: Path, *, does: str) -> Path:
    """A compiler that introduces itself and then runs the shell command `does`."""
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) echo "fake 1.0"; exit 0;; esac\n{does}\n'
    )
    path.chmod(0o755)
    return path


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_it_is_compiled_once(tmp_path: Path, small_sources: Path, compiler: list[str]) -> None:
    told: list[tuple[int, int]] = []

    def progress(done_bytes: int, total_bytes: int) -> None:
        told.append((done_bytes, total_bytes))

    path = build(LEVEL, tmp_path, sources=small_sources, progress=progress)
    total = sum(path.stat().st_size for path in small_sources.glob("*.cpp"))
    assert [told[0], told[-1]] == [(0, total), (total, total)]
    assert told == sorted(set(told))
    assert len(told) == 3
    told.clear()
    key = path.parent.name
    assert names(tmp_path) == [f".{key}.lock", f"{key}/kernels.so"]
    before = path.stat()
    assert build(LEVEL, tmp_path, sources=small_sources, progress=progress) == path
    assert path.stat() == before
    assert not told


@pytest.mark.parametrize("num_left", [0, 100, -5000, -1])
def test_a_damaged_library_is_compiled_again(
    num_left: int, tmp_path: Path, small_sources: Path, small_library: Library
) -> None:
    folder = tmp_path / small_library.path.parent.name
    shutil.copytree(small_library.path.parent, folder)
    path = folder / small_library.path.name
    whole = path.read_bytes()
    path.write_bytes(whole[:num_left])
    assert build(LEVEL, tmp_path, sources=small_sources) == path
    assert len(path.read_bytes()) == len(whole)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_sources_compile_without_a_warning(level: LevelName, compiler: list[str]) -> None:
    flags = [*FLAGS, *LEVELS[level].flags, "-Werror", "-fsyntax-only"]
    sources = map(str, SOURCES.glob("*.cpp"))
    subprocess.run([*compiler, *flags, *sources], check=True)


def test_the_key_holds_sources_flags_and_compiler(
    tmp_path: Path, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.cpp").write_text("1")
    (sources / "a.h").write_text("2")
    does = 'while [ "$1" != -o ]; do shift; done; : > "$2"'
    made = []

    def build_with(version: str, sanitizers: tuple[str, ...] = ()) -> None:
        script = fake_compiler(tmp_path / "compiler", does=does)
        script.write_text(script.read_text().replace("fake 1.0", version))
        monkeypatch.setenv("CXX", f"{script} -DX")
        made.append(build(LEVEL, tmp_path / "cache", sources=sources, sanitizers=sanitizers))

    build_with("1.0")
    build_with("1.0")
    assert made[0] == made[1]
    build_with("1.1")
    build_with("1.1", ("address",))
    (sources / "a.h").write_text("3")
    build_with("1.1")
    (sources / "b.cpp").write_text("")
    build_with("1.1")
    assert len(set(made)) == 5


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("echo 'a.cpp:1: error: boom' >&2; exit 1", r"-c .*\.cpp -o .*\.o\na\.cpp:1: error: boom"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "exit code -9"),
        ('case "$*" in *-shared*) echo no linker; exit 1;; *) out=; ', "no linker"),
    ],
)
def test_what_the_compiler_says_is_passed_on(
    does: str, message: str, tmp_path: Path, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if does.startswith("case"):
        does += 'while [ "$1" != -o ]; do shift; done; : > "$2";; esac'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "compiler", does=does)))
    with pytest.raises(BuildError, match=message):
        build(LEVEL, tmp_path / "cache", sources=small_sources)
    assert [name.partition(".")[2][-4:] for name in names(tmp_path / "cache")] == ["lock"]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(no-such-compiler\); install"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"\(g\+\+, clang\+\+, c\+\+\)"):
        find_compiler()
    fake_compiler(tmp_path / "clang++", does="exit 1")
    assert find_compiler() == [str(tmp_path / "clang++")]


def test_two_processes_compile_once(
    tmp_path: Path, small_sources: Path, compiler: list[str], environment: dict[str, str]
) -> None:
    does = (
        f'case "$*" in *-shared*) echo >> {tmp_path}/links;; esac\nexec {" ".join(compiler)} "$@"'
    )
    script = (
        "import sys; from pathlib import Path; from headway.kernels.cpu.build import build\n"
        "print(build('avx2', Path(sys.argv[1]), sources=Path(sys.argv[2])))"
    )
    environment |= {"CXX": str(fake_compiler(tmp_path / "compiler", does=does))}
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), str(small_sources)]
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=60)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(said) == 1
    assert Path(said.pop()).is_file()
    assert (tmp_path / "links").read_text() == "\n"
