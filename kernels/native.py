"""Native bodies or the reference: decided here, for whoever owns a computation.

A contract takes `team: Team | None`. With a team it runs the native body, with None the reference.
The owner (an engine, a test) starts one team and passes it on; there is no global one.
"""

import logging
import tempfile
from pathlib import Path
from typing import Literal

from headway.kernels.cache import cache_folder
from headway.kernels.cpu.build import BuildError, CompileProgress, build, no_progress
from headway.kernels.cpu.levels import LEVELS, KernelChoice, LevelName, usable_levels
from headway.kernels.cpu.library import Library, Team

logger = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """The native bodies cannot serve here; says why and what would help."""


def start_team(
    choice: KernelChoice,
    num_threads: int,
    *,
    pinned: bool = False,
    progress: CompileProgress = no_progress,
) -> Team | None:
    """Start the threads that run native bodies; None means that the reference serves.

    `auto` takes the best level that works, and where none does logs why and returns None.

    Raises:
        NativeUnavailable: a level was asked for by name and cannot be had.
    """
    if choice == "reference":
        return None
    try:
        library = load_library(choice, progress)
        return Team(library, num_threads, pinned=pinned)
    except (NativeUnavailable, OSError) as error:
        if choice != "auto":
            raise NativeUnavailable(f"kernels={choice}: {error}") from error
        logger.warning("kernels=reference, which is slow, because %s", error)
        return None


def load_library(
    choice: Literal["auto"] | LevelName, progress: CompileProgress = no_progress
) -> Library:
    """Load the bodies for a level, compiled if need be; `auto` is the best level that works.

    Raises:
        NativeUnavailable: there is none.
    """
    levels = usable_levels()
    if choice != "auto":
        if choice not in levels:
            raise NativeUnavailable(
                f"this processor lacks {choice}; it can run {', '.join(levels) or 'none'} of "
                f"{', '.join(LEVELS)}. Leave the choice to auto"
            )
        levels = [choice]
    reasons = [] if levels else ["this processor is no x86-64 with AVX2"]
    for level in reversed(levels):
        try:
            library = _load(level, cache_folder() / "kernels", progress)
        except (BuildError, OSError) as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            logger.warning("kernels=%s, since a better level failed: %s", level, reason)
        return library
    raise NativeUnavailable(reasons[0])


def _load(level: LevelName, folder: Path, progress: CompileProgress) -> Library:
    try:
        path = build(level, folder, progress=progress)
    except OSError as error:
        logger.warning(
            "kernels are compiled at each start, because %s: set HEADWAY_CACHE_DIR", error
        )
        # What is loaded stays in memory when its file is gone.
        with tempfile.TemporaryDirectory(prefix="headway-kernels-") as private:
            return Library(build(level, Path(private), progress=progress), level)
    return Library(path, level)
