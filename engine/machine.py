"""What of this machine can be taken and is: cores and memory, within control groups. Knows no models.

torch is imported where it is needed: `headway doctor` reads the host where torch may be broken.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may keep busy: its affinity and its quota decide."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = " ".join(_lines(_CGROUP / "cpu.max")).split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(1, cores)


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that can be taken now."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


def free_host_bytes() -> int:
    """Return the host's memory that can be taken, within the control group's limit if there is one.

    What only caches files counts as free: the kernel drops it when memory is asked for.
    """
    available = [line for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    free = [1 << 62, *(int(line.split()[1]) * 1024 for line in available)]
    limit = _lines(_CGROUP / "memory.max")
    used = _lines(_CGROUP / "memory.current")
    cached = [line for line in _lines(_CGROUP / "memory.stat") if line.startswith("file ")]
    if limit and used and cached and limit[0] != "max":
        free.append(int(limit[0]) - int(used[0]) + int(cached[0].split()[1]))
    return min(free)


def resident_bytes(*, peak: bool = False) -> int:
    """Return the memory that this process holds, or the most it ever held; 0 where nothing tells."""
    field = "VmHWM:" if peak else "VmRSS:"
    found = [line for line in _lines(Path("/proc/self/status")) if line.startswith(field)]
    return sum(int(line.split()[1]) * 1024 for line in found)


def _lines(path: Path) -> list[str]:
    """Return a system file's lines; none where there is no such file."""
    return path.read_text().splitlines() if path.is_file() else []
