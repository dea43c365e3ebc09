"""The levels of a machine are read from what its kernel lists."""

from itertools import pairwise
from pathlib import Path

import pytest

from headway.kernels.cpu import levels
from headway.kernels.cpu.levels import LEVELS, usable_levels

AVX2 = "sse4_2 avx avx2 fma f16c bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl avx512_vnni"
AMX = f"{AVX512} avx512_bf16 amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("flags", "machine", "granted", "names"),
    [
        ("sse4_2 avx", "x86_64", True, []),
        (AVX2, "x86_64", True, ["avx2"]),
        (AVX2.replace("bmi2", ""), "x86_64", True, []),
        (AVX512, "x86_64", True, ["avx2", "avx512"]),
        (AVX512.replace("avx512_vnni", ""), "x86_64", True, ["avx2"]),
        (AMX, "x86_64", True, ["avx2", "avx512", "amx"]),
        (AMX, "x86_64", False, ["avx2", "avx512"]),
        (AMX, "aarch64", True, []),
        (None, "x86_64", True, []),
    ],
)
def test_levels_follow_the_processor_and_the_kernel(
    flags: str | None,
    machine: str,
    granted: bool,
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nprocessor\t: 1\nflags\t\t: none\n")
    monkeypatch.setattr(levels, "_CPUINFO", cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(levels, "_amx_granted", lambda: granted)
    assert usable_levels() == names


def test_each_level_holds_the_one_below() -> None:
    ladder = list(LEVELS.values())
    for low, high in pairwise(ladder):
        assert low.features < high.features
        assert high.flags[: len(low.flags)] == low.flags
