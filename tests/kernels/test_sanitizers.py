"""All tests of native bodies again, on bodies that watch their memory and their arithmetic."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIBRARIES = ("libasan.so", "libstdc++.so.6")
"""Loaded before the interpreter: the first replaces malloc, and has to find the second's throw."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_address_and_undefined_behaviour(compiler: list[str], environment: dict[str, str]) -> None:
    paths = [
        subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()
        for name in LIBRARIES
    ]
    if not all(map(Path.is_absolute, map(Path, paths))):
        pytest.skip("the compiler comes without the address sanitizer")
    environment |= {
        "LD_PRELOAD": " ".join(paths),
        # The interpreter frees little at its end; that is not ours to mend.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    options = ["-q", "-p", "no:cacheprovider", "--sanitizers=address,undefined", "-k", "team"]
    command = [sys.executable, "-m", "pytest", str(HERE), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
