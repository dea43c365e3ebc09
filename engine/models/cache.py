"""The cache folder, and how a folder enters it: whole or not at all.

Knows nothing of what the folders hold; store.py keeps pulled models here, convert.py converted ones.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.engine.errors import ModelLoadError

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all); stages are download, unpack, convert and load."""


def no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    """Report to nobody."""


def cache_folder() -> Path:
    """Return where Headway keeps models: HEADWAY_CACHE_DIR, else headway in the user's cache."""
    if chosen := os.environ.get("HEADWAY_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headway"


def ensure_folder(target: Path, num_bytes: int, fill: Callable[[Path], None]) -> Path:
    """Return `target`, first made by `fill` if it is not there.

    `fill` gets an empty folder beside the target that takes its name when `fill` returns. What a
    killed process left behind is removed, and two processes that want one folder make it once.

    Raises:
        ModelLoadError: `num_bytes` do not fit on the disk, or the cache cannot be written.
    """
    if target.is_dir():
        return target
    staging = target.with_name(f".{target.name}.partial")
    with _disk_errors(target, num_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if target.is_dir():
                return target
            shutil.rmtree(staging, ignore_errors=True)
            if shutil.disk_usage(target.parent).free < num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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


@contextmanager
def _disk_errors(target: Path, num_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "Set HEADWAY_CACHE_DIR to a folder that can be written."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "Free some space, or set HEADWAY_CACHE_DIR to a larger disk."
        raise ModelLoadError(
            f"cannot write {target} ({num_bytes / 1e6:.0f} MB): {error.strerror or error}. {advice}"
        ) from error
