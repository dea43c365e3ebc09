"""Instructions are encoded as told, and a team runs them in order on all of its threads."""

import gc
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from headway.kernels.cpu.build import SOURCES
from headway.kernels.cpu.library import Argument, Kernel, Library, Team

KERNEL = Kernel("scale", 4096, ("x", "rows", "scale"), ("p", "i", "d"))


def chain(
    library: Library, buffers: tuple[torch.Tensor, torch.Tensor], length: int
) -> list[list[int]]:
    """Instructions that add one to a buffer into the other, to and fro."""
    add_one, size = library.kernels["add_one"], buffers[0].numel()
    return [
        add_one.encode(
            {"from": buffers[i % 2], "to": buffers[1 - i % 2], "size": size, "extra": 0.0}
        )
        for i in range(length)
    ]


def thread_states(field: str) -> dict[str, str]:
    """A line of /proc/.../status of each thread of this process."""
    states = {}
    for path in Path("/proc/self/task").iterdir():
        lines = (path / "status").read_text().splitlines()
        states[path.name] = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return states


def test_an_instruction_is_body_length_and_words() -> None:
    x = torch.zeros(3)
    assert KERNEL.encode({"scale": 1.0, "rows": -3, "x": x}) == [
        4096,
        3,
        x.data_ptr(),
        -3,
        0x3FF0000000000000,
    ]
    assert KERNEL.encode({"x": None, "rows": 0, "scale": 0})[2:] == [0, 0, 0]
    assert KERNEL.encode({"x": 64, "rows": 0, "scale": -0.0})[2:] == [64, 0, -(1 << 63)]


@pytest.mark.parametrize(
    "arguments", [{"x": 0, "rows": 1}, {"x": 0, "rows": 1, "scale": 1, "y": 0}]
)
def test_missing_and_unknown_arguments_are_refused(arguments: dict[str, Argument]) -> None:
    with pytest.raises(TypeError, match=r"scale takes \('x', 'rows', 'scale'\)"):
        KERNEL.encode(arguments)


def test_a_library_tells_its_kernels(small_library: Library) -> None:
    assert list(small_library.kernels) == ["add_one"]
    kernel = small_library.kernels["add_one"]
    assert kernel.fields == ("from", "to", "size", "extra")
    assert kernel.kinds == ("p", "p", "i", "d")


def test_every_level_has_every_kernel(library: Library) -> None:
    """A body that is compiled for some levels alone would be missed only when it is called."""
    sources = "".join(path.read_text() for path in SOURCES.glob("*.cpp"))
    names = re.findall(r'Registration \w+\(\s*"(\w+)"', sources)
    assert sorted(library.kernels) == sorted(names)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 101])
def test_what_one_writes_the_next_may_read(
    small_library: Library, num_threads: int, length: int
) -> None:
    buffers = torch.zeros(13, dtype=torch.int64), torch.full((13,), -1)
    team = Team(small_library, num_threads)
    for run in range(1, 4):
        team.run_all(chain(small_library, buffers, 2 * length))
        assert buffers[0].tolist() == [2 * length * run] * 13
    team.close()
    team.close()


def test_teams_at_once_do_not_meet(small_library: Library) -> None:
    results = {}

    def use(name: int) -> None:
        buffers = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
        team = Team(small_library, 2)
        for _ in range(20):
            team.run_all(chain(small_library, buffers, 50))
        team.close()
        results[name] = buffers[0].tolist()

    threads = [threading.Thread(target=use, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(3), [1000] * 5)


def test_threads_leave_signals_to_others_and_end_with_their_team(small_library: Library) -> None:
    before = set(thread_states("SigBlk"))
    team = Team(small_library, 4)
    masks = [mask for name, mask in thread_states("SigBlk").items() if name not in before]
    assert len(masks) == 3
    # SIGKILL, SIGSTOP and the two that the C library keeps cannot be blocked.
    assert all(int(mask, 16) | 0x1_8004_0100 == (1 << 64) - 1 for mask in masks)
    del team
    gc.collect()
    assert set(thread_states("SigBlk")) <= before


def test_pinned_threads_have_a_core_each_and_the_caller_keeps_its_own(
    small_library: Library,
) -> None:
    before = thread_states("Cpus_allowed_list")
    team = Team(small_library, 3, pinned=True)
    buffers = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    team.run_all(chain(small_library, buffers, 2))
    after = thread_states("Cpus_allowed_list")
    assert {name: after[name] for name in before} == before
    assert all(after[name].isdigit() for name in after.keys() - before.keys())
    team.close()


def test_a_team_that_cannot_be_is_refused(small_library: Library) -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        Team(small_library, 0)


SCRIPT = """
import resource, sys, threading, time
from pathlib import Path
import numpy as np
from headway.kernels.cpu.library import Library, Team

library = Library(Path(sys.argv[1]), "avx2")
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 29), limits[1]))
try:
    Team(library, 1024)
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, limits)

x = np.zeros(4, np.int64)
arguments = {"from": x.ctypes.data, "to": x.ctypes.data, "size": 0, "extra": 0.0}
words = [library.kernels["add_one"].encode(arguments)] * 1000
asleep, busy = Team(library, 3), Team(library, 3)

def run():
    while True:
        busy.run_all(words)

threading.Thread(target=run, daemon=True).start()
asleep.run_all(words)
time.sleep(0.05)
print("left")
"""


def test_a_process_survives_its_teams(small_library: Library, environment: dict[str, str]) -> None:
    """Too many threads are an error, and neither sleeping nor running ones hold up the end."""
    command = [sys.executable, "-c", SCRIPT, str(small_library.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1024 threads cannot be started\nleft\n"
