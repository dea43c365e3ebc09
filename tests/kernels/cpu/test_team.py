"""The team under the thread sanitizer, in a program of its own."""

import subprocess
from pathlib import Path

import pytest

from headway.kernels.cpu.build import SOURCES


def test_the_thread_sanitizer_finds_no_race(tmp_path: Path, compiler: list[str]) -> None:
    program = tmp_path / "stress"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{SOURCES}"]
    sources = [str(Path(__file__).parent / "team_stress.cpp"), str(SOURCES / "team.cpp")]
    command = [*compiler, *flags, *sources, "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode and "tsan" in made.stderr:
        pytest.skip("the compiler comes without the thread sanitizer")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=100)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel randomises addresses more than the sanitizer can take")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
