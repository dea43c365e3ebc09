"""Levels: the instruction sets that native bodies are written for, and which this machine has."""

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LevelName = Literal["avx2", "avx512", "amx"]
KernelChoice = Literal["auto", "reference", "avx2", "avx512", "amx"]
"""What native.py is asked for: a level, the best one that works, or no native bodies at all."""

_CPUINFO = Path("/proc/cpuinfo")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Level:
    """One step of the ladder; each holds what the ones before it hold."""

    features: frozenset[str]
    """What /proc/cpuinfo has to list."""
    flags: tuple[str, ...]
    """What the compiler is told."""


def _level(below: Level | None, features: str, flags: str) -> Level:
    old = below or Level(frozenset(), ())
    return Level(old.features | set(features.split()), old.flags + tuple(flags.split()))


_AVX2 = _level(None, "avx2 fma f16c bmi2", "-mavx2 -mfma -mf16c -mbmi2")
_AVX512 = _level(
    _AVX2,
    "avx512f avx512bw avx512dq avx512vl avx512_vnni",
    "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni",
)
_AMX = _level(
    _AVX512,
    "avx512_bf16 amx_tile amx_int8 amx_bf16",
    "-mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16",
)
LEVELS: dict[LevelName, Level] = {"avx2": _AVX2, "avx512": _AVX512, "amx": _AMX}
"""The least first."""


def usable_levels() -> list[LevelName]:
    """Return the levels that can run here, the least first; none on other than x86-64 Linux.

    Asks the kernel for AMX's registers, which it grants to a process once and for all.
    """
    if platform.machine() != "x86_64" or not _CPUINFO.exists():
        return []
    lines = _CPUINFO.read_text().splitlines()
    features = next((line.split() for line in lines if line.startswith("flags")), [])
    names: list[LevelName] = [name for name in LEVELS if LEVELS[name].features <= set(features)]
    return [name for name in names if name != "amx" or _amx_granted()]


def _amx_granted() -> bool:
    """Without this permission the first tile instruction is SIGILL; containers may refuse it."""
    ask = ctypes.CDLL(None).syscall
    numbers = map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    return int(ask(*numbers)) == 0
