"""Compiles the C++ bodies for this machine's processor, once, and keeps the result in the cache.

Knows compilers and flags; library.py knows what is in the result.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
LEVELS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx512": (
        *("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512dq"),
        *("-mavx512vl", "-mavx512vnni"),
    ),
    "amx": (
        *("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512dq"),
        *("-mavx512vl", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    ),
}
"""Instruction sets that bodies are written for, the least first, and the compiler's flags."""

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-ffp-contract=off")


def build(level: str, cache: Path) -> Path:
    """Return the shared library for `level`, compiled if the cache does not have it."""
    sources = sorted(SOURCES.glob("*.cpp"))
    texts = [path.read_bytes() for path in (*sources, *sorted(SOURCES.glob("*.h")))]
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "c++"
    command = [compiler, *_FLAGS, *LEVELS[level]]
    key = hashlib.sha256(b"\0".join([*texts, " ".join(command).encode()])).hexdigest()[:16]
    target = cache / f"kernels-{level}-{key}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        staging = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, *map(str, sources), "-o", str(staging)], check=True)
        staging.rename(target)
    return target
