"""All tests of native bodies again, on bodies that watch their memory and their arithmetic."""

import subprocess
import sys
from pathlib import Path

import pytest

KERNEL_TESTS = Path(__file__).parents[1]

OVERRUN = """
import sys
from pathlib import Path
import torch
from headway.kernels.cpu.build import build
from headway.kernels.cpu.library import Library, Team
path = build("avx2", Path(sys.argv[1]), sources=Path(sys.argv[2]), sanitizers=["address"])
x = torch.zeros(13, dtype=torch.int64)
Team(Library(path, "avx2"), 2).call("add_one", **{"from": x, "to": x, "size": int(sys.argv[3]), "extra": 0.0})
"""


@pytest.fixture
def sanitized(compiler: list[str], environment: dict[str, str]) -> dict[str, str]:
    """The environment of an interpreter that can load instrumented bodies.

    Loaded before all else: libasan replaces malloc, and has to find libstdc++'s throw.
    """
    paths = [
        subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip("the compiler comes without the address sanitizer")
    # The interpreter frees little at its end; that is not ours to mend.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return environment | options | {"LD_PRELOAD": " ".join(paths)}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "is_found"), [(13, False), (14, True)])
def test_an_overrun_is_found(
    size: int, is_found: bool, tmp_path: Path, small_sources: Path, sanitized: dict[str, str]
) -> None:
    command = [sys.executable, "-c", OVERRUN, str(tmp_path), str(small_sources), str(size)]
    done = subprocess.run(command, env=sanitized, capture_output=True, text=True, timeout=100)
    assert ("heap-buffer-overflow" in done.stderr) == is_found, done.stderr
    assert bool(done.returncode) == is_found, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_address_and_undefined_behaviour(sanitized: dict[str, str]) -> None:
    options = ["-q", "-p", "no:cacheprovider", "--sanitizers=address,undefined", "--timeout=600"]
    command = [sys.executable, "-m", "pytest", str(KERNEL_TESTS), *options]
    done = subprocess.run(command, env=sanitized, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
