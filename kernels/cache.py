"""The cache folder, and how a folder enters it: whole or not at all.

Knows nothing of what the folders hold. It lies here since kernels is the lowest room that needs it.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Return where Headway keeps files: HEADWAY_CACHE_DIR, else headway in the user's cache."""
    if chosen := os.environ.get("HEADWAY_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headway"


def make_folder(
    target: Path, fill: Callable[[Path], None], is_whole: Callable[[Path], bool] = Path.is_dir
) -> Path:
    """Return `target`, first made by `fill` if it is not there or `is_whole` finds it damaged.

    `fill` gets an empty folder beside the target that takes its name when `fill` returns. What a
    killed process left behind is removed, and two processes that want one folder make it once.

    Raises:
        OSError: the folder around `target` cannot be written.
    """
    if is_whole(target):
        return target
    staging = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock")):
        if is_whole(target):
            return target
        for old in (target, staging):
            shutil.rmtree(old, ignore_errors=True)
        try:
            staging.mkdir()
            fill(staging)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel lets go of it when the process dies, however it dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
