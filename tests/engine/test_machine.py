"""Cores and memory are what the kernel would give, within the control group's limits."""

from pathlib import Path

import pytest

from headway.engine import machine
from headway.engine.machine import free_host_bytes, resident_bytes, usable_cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"max": "max", "current": "70", "stat": "anon 9\nfile 30"}, None),
        ({"max": "100", "current": "70", "stat": "anon 9\nfile 30"}, 60),
        ({"max": "100", "current": "70"}, None),  # a limit of which nothing more is known
    ],
)
def test_control_group_limit(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    free = free_host_bytes()
    assert free == expected if expected is not None else free > 1 << 20


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("250000 100000", 3), ("1000 100000", 1), ("9900000 100000", 8)],
)
def test_cores_within_affinity_and_quota(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == expected


def test_resident_memory_and_its_peak() -> None:
    before, peak = resident_bytes(), resident_bytes(peak=True)
    assert 1 << 20 < before <= peak
    held = bytearray(b"x" * (64 << 20))
    assert resident_bytes() > before + (32 << 20)
    del held
    assert resident_bytes(peak=True) >= before + (32 << 20)
