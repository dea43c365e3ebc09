"""The tokenizer's thread as an executor, and at the end of the process."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headway.server.tokenizer_thread import TokenizerThread

STUCK = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from headway.server.tokenizer_thread import TokenizerThread
thread, started = TokenizerThread(), threading.Event()
def work():
    started.set()
    while True:
        pass
thread.submit(work)
started.wait()
thread.shutdown()
"""


def test_work_runs_in_order_on_one_thread_and_errors_come_back() -> None:
    thread, seen, go = TokenizerThread(), list[int](), threading.Event()
    first = thread.submit(go.wait)
    skipped = thread.submit(seen.append, 0)
    later = [thread.submit(seen.append, i) for i in (1, 2, 3)]
    failing = thread.submit(int, "x")
    assert skipped.cancel()
    go.set()
    assert first.result(5)
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(5)
    assert all(future.done() for future in later)
    assert seen == [1, 2, 3]
    thread.shutdown()


def test_work_that_never_ends_does_not_keep_the_process() -> None:
    source = Path(__file__).parents[2] / ".src"
    subprocess.run([sys.executable, "-c", STUCK, str(source)], check=True, timeout=20)
