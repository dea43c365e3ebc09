"""How a folder of a model enters the cache, and what is said when the disk does not take it.

Knows nothing of what the folders hold; store.py keeps pulled models here, convert.py converted ones.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.engine.errors import ModelLoadError
from headway.kernels.cache import make_folder

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all); stages are download, unpack, convert, pack, load and compile."""


def no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    """Report to nobody."""


def ensure_folder(target: Path, num_bytes: int, fill: Callable[[Path], None]) -> Path:
    """Return `target`, first made by `fill` if it is not there; see make_folder.

    Raises:
        ModelLoadError: `num_bytes` do not fit on the disk, or the cache cannot be written.
    """

    def fill_if_there_is_room(staging: Path) -> None:
        if shutil.disk_usage(staging).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fill(staging)

    with _disk_errors(target, num_bytes):
        return make_folder(target, fill_if_there_is_room)


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
