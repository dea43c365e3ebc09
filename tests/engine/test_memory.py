"""Free memory is what the kernel would give, within the control group's limit."""

from pathlib import Path

import pytest

from headway.engine import memory
from headway.engine.memory import free_host_bytes


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
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    free = free_host_bytes()
    assert free == expected if expected is not None else free > 1 << 20
