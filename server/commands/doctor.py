"""`headway doctor`: what this machine has, and what would keep Headway from running on it."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.engine.machine import free_host_bytes, usable_cores
from headway.engine.models.store import list_models
from headway.kernels.cache import cache_folder
from headway.kernels.cpu.build import BuildError, compiler_version, find_compiler

Verdict = Literal["ok", "note", "broken"]
STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}
INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "sve",
)
PACKAGES = ("torch", "triton", "transformers", "safetensors", "gguf", "numpy", "grpcio", "protobuf")
"""Shown even where nothing is wrong with them."""


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """Show what this machine has and what clashes.

    Exit code 1 means that something is broken.
    """

    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; a note slows Headway down, something broken stops it."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def doctor(config: DoctorConfig) -> int:
    """Print every finding and return the exit code."""
    findings = list(examine())
    if config.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console().print(_table(findings))
    return 1 if any(finding.verdict == "broken" for finding in findings) else 0


def examine() -> Iterator[Finding]:
    """Look at the interpreter, the packages, the machine and the caches."""
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield from examine_packages()
    yield _stubs()
    yield from _torch()
    yield _compiler()
    yield _kernels()
    yield _processor()
    yield _memory()
    yield from _caches()


def examine_packages() -> Iterator[Finding]:
    """Compare installed versions with what Headway, and what it needs, ask for."""
    for name in PACKAGES:
        version = _version(name)
        if version is not None:
            yield Finding(name, version)
    try:
        wanted = metadata.requires("headway") or []
    except metadata.PackageNotFoundError:
        yield Finding("headway", "not installed", "note", "its requirements cannot be compared")
        wanted = []
    else:
        yield Finding("headway", metadata.version("headway"))
    yield from clashes("headway", wanted)
    for package in sorted({Requirement(text).name for text in wanted if _applies(text)}):
        if _version(package) is not None:
            yield from clashes(package, metadata.requires(package) or [])


def clashes(owner: str, requirements: Iterable[str]) -> Iterator[Finding]:
    """Yield each requirement of `owner` that is not met here."""
    for text in filter(_applies, requirements):
        requirement = Requirement(text)
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            asked = f"{requirement.name}{requirement.specifier}"
            yield Finding(
                canonicalize_name(requirement.name),
                version or "missing",
                "broken",
                f'{owner} needs {asked}: pip install "{asked}"',
            )


def _applies(text: str) -> bool:
    marker = Requirement(text).marker
    return marker is None or marker.evaluate({"extra": ""})


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _stubs() -> Finding:
    """Import the generated code, which refuses a grpcio or protobuf older than its generator."""
    try:
        from headway.protos import text_generation_pb2_grpc  # noqa: F401 # the import is the test
    except Exception as error:
        return Finding("gRPC stubs", f"{error}", "broken", "install newer grpcio and protobuf")
    return Finding("gRPC stubs", "load")


def _torch() -> Iterator[Finding]:
    """Import torch: its version alone does not tell whether its libraries can be loaded."""
    try:
        import torch
    except Exception as error:
        yield Finding("torch import", f"{error}", "broken", "install torch again")
        return
    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch can use; models run on the CPU")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{properties.name}, {_size(properties.total_memory)}")


def _compiler() -> Finding:
    try:
        compiler = find_compiler()
        return Finding("C++ compiler", f"{compiler[0]}: {compiler_version(compiler)}")
    except BuildError as error:
        advice = "install g++ or clang++; without one, slower kernels serve"
        return Finding("C++ compiler", f"{error}", "note", advice)


def _kernels() -> Finding:
    """Load the native kernels as a server would, compiled where they are not in the cache yet."""
    try:
        from headway.kernels.native import load_library

        library = load_library("auto")
    except Exception as error:
        return Finding("kernels", f"reference, because {error}", "note", "slower kernels serve")
    found = f"{library.level}, {len(library.kernels)} kernels"
    if not library.path.exists():
        advice = "set HEADWAY_CACHE_DIR to a folder that can be written"
        return Finding("kernels", f"{found}, compiled at each start", "note", advice)
    return Finding("kernels", f"{found}, {library.path}")


def _processor() -> Finding:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    values = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    flags = values.get("flags", values.get("Features", "")).split()
    sets = [name for name in INSTRUCTION_SETS if name in flags]
    name = values.get("model name", platform.processor() or platform.machine())
    shown = (
        f"{name}; {usable_cores()} cores usable; {' '.join(sets) or 'no known instruction sets'}"
    )
    if sets and platform.machine() == "x86_64" and "avx2" not in sets:
        return Finding("CPU", shown, "note", "without AVX2, slower kernels serve")
    return Finding("CPU", shown)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    capped = f"; this container may use {_size(int(text))}" if text.isdigit() else ""
    return Finding("memory", f"{_size(free_host_bytes())} free of {_size(total)}{capped}")


def _caches() -> Iterator[Finding]:
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    shown = f"{folder}: {_size(_folder_bytes(folder))} used, {_size(free)} free on its disk"
    if not os.access(existing, os.W_OK):
        advice = "set HEADWAY_CACHE_DIR to a folder that can be written"
        yield Finding("cache", f"{folder}: cannot be written", "broken", advice)
    else:
        yield Finding("cache", shown)
    for model in list_models():
        yield Finding(f"model {model.name}", model.state)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _table(findings: Iterable[Finding]) -> Table:
    table = Table("what", "found", "")
    for finding in findings:
        style = STYLES[finding.verdict]
        advice = f": {escape(finding.advice)}" if finding.advice else ""
        note = f"[{style}]{finding.verdict}[/]{advice}"
        table.add_row(finding.name, escape(finding.value), note)
    return table
