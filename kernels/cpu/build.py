"""Compiles the C++ bodies for a level of processor, once, and keeps the result in a folder.

Knows compilers and flags; library.py knows what is in the result, native.py what to do without it.
"""

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from headway.kernels.cache import make_folder
from headway.kernels.cpu.levels import LEVELS, LevelName

SOURCES = Path(__file__).parent

logger = logging.getLogger(__name__)

_COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra")
_DIGEST_BYTES = hashlib.sha256().digest_size
_TIMEOUT_SECONDS = 600


CompileProgress = Callable[[int, int], None]
"""Called with the bytes of C++ that are compiled, and those in all."""


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Report to nobody."""


class BuildError(Exception):
    """There is no compiler, or it did not do what it was asked; says what the compiler said."""


def find_compiler() -> list[str]:
    """Return the C++ compiler's command: CXX, else the first of g++, clang++ and c++.

    Raises:
        BuildError: there is none.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    for name in asked[:1] or _COMPILERS:
        if path := shutil.which(name):
            return [path, *asked[1:]]
    names = ", ".join(asked[:1] or _COMPILERS)
    raise BuildError(f"there is no C++ compiler ({names}); install g++ or clang++, or set CXX")


def compiler_version(compiler: Sequence[str]) -> str:
    """Return the line by which a compiler introduces itself."""
    return _run([*compiler, "--version"]).partition("\n")[0]


def build(
    level: LevelName,
    folder: Path,
    *,
    sources: Path = SOURCES,
    sanitizers: Sequence[str] = (),
    progress: CompileProgress = no_progress,
) -> Path:
    """Return the shared library for `level`, compiled if `folder` does not hold it undamaged.

    `sources` is a folder of .cpp and .h files. The sanitizers are the compiler's: address, undefined.
    `progress` is told only when something is compiled, from this thread.

    Raises:
        BuildError: it cannot be compiled.
        OSError: the folder cannot be written.
    """
    compiler = find_compiler()
    command = [*compiler, *FLAGS, *LEVELS[level].flags]
    if sanitizers:
        command += [f"-fsanitize={','.join(sanitizers)}", "-fno-sanitize-recover=all"]
        command += ["-O1", "-g", "-fno-omit-frame-pointer"]
    texts = [path.read_bytes() for path in sorted(sources.glob("*.[ch]*"))]
    about = [" ".join(command).encode(), compiler_version(compiler).encode(), *texts]
    key = hashlib.sha256(b"\0".join(about)).hexdigest()[:16]

    def fill(staging: Path) -> None:
        logger.info("compiling the kernels for %s, once, into %s", level, folder)
        _compile(command, list(sources.glob("*.cpp")), staging, progress)

    return _library(make_folder(folder / f"{level}-{key}", fill, _is_whole))


def _library(folder: Path) -> Path:
    return folder / "kernels.so"


def _compile(
    command: Sequence[str], sources: Sequence[Path], folder: Path, progress: CompileProgress
) -> None:
    """Compile the sources side by side and link them; the library ends in its own SHA-256."""
    # The longest first: whoever is started last is waited for.
    sources = sorted(sources, key=lambda path: (-path.stat().st_size, path.name))
    objects = [folder / f"{source.stem}.o" for source in sources]
    jobs = [
        [*command, "-c", str(source), "-o", str(out)]
        for source, out in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = {
            pool.submit(_run, job): source.stat().st_size
            for job, source in zip(jobs, sources, strict=True)
        }
        done_bytes, total_bytes = 0, sum(runs.values())
        progress(done_bytes, total_bytes)
        for run in as_completed(runs):
            run.result()
            done_bytes += runs[run]
            progress(done_bytes, total_bytes)
    _run([*command, "-shared", *map(str, objects), "-o", str(_library(folder))])
    for path in objects:
        path.unlink()
    with _library(folder).open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.write(digest)


def _is_whole(folder: Path) -> bool:
    """Whether the library is there as it was built.

    The dynamic loader maps what it is given: a file cut short would end the process with SIGBUS.
    """
    if not _library(folder).is_file():
        return False
    data = memoryview(_library(folder).read_bytes())
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise BuildError(f"{shlex.join(command)}\n{said}")
    return done.stdout
