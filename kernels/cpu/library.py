"""The compiled bodies as Python sees them: Library finds kernels, Team runs instructions.

Knows no kernel by name: what arguments a body takes is told by the library itself.
"""

import ctypes
import struct
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from headway.kernels.cpu.levels import LevelName

Argument = torch.Tensor | int | float | None
"""A tensor stands for its address, as does an int for a pointer; None is 0: a null pointer, no window."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One body: where it is and what words it wants."""

    name: str
    address: int
    fields: tuple[str, ...]
    kinds: tuple[str, ...]
    """p pointer, i int64, d double: one for each field."""

    def encode(self, arguments: dict[str, Argument]) -> list[int]:
        """One instruction: address, number of words, words.

        Example, a kernel at 4096 with fields x:p rows:i scale:d, x at 64, 3 rows and scale 1.0:

            [4096, 3, 64, 3, 0x3FF0000000000000]
        """
        if set(arguments) != set(self.fields):
            raise TypeError(f"{self.name} takes {self.fields}, got {tuple(arguments)}")
        pairs = zip(self.fields, self.kinds, strict=True)
        words = [encode_word(kind, arguments[field]) for field, kind in pairs]
        return [self.address, len(words), *words]


def encode_word(kind: str, value: Argument) -> int:
    """The 64-bit word that stands for an argument."""
    if kind == "d":
        assert isinstance(value, int | float)
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    if isinstance(value, torch.Tensor):
        assert kind == "p"
        return value.data_ptr()
    assert value is None or isinstance(value, int)
    return value or 0


class Library:
    """A shared library of kernel bodies."""

    def __init__(self, path: Path, level: LevelName) -> None:
        self.path = path
        self.level = level
        self.dll = _open(path)
        kernels = list(_kernels(self.dll))
        self.kernels = {kernel.name: kernel for kernel in kernels}
        assert len(self.kernels) == len(kernels), "two bodies have one name"


_POINTER, _TEXT, _INT = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "next_kernel": (_POINTER, [_POINTER]),
    "kernel_name": (_TEXT, [_POINTER]),
    "kernel_fields": (_TEXT, [_POINTER]),
    "kernel_body": (_POINTER, [_POINTER]),
    "team_create": (_POINTER, [_INT, _INT]),
    "team_run": (None, [_POINTER, _POINTER, ctypes.c_int64]),
    "team_destroy": (None, [_POINTER]),
}
"""Result and arguments of the functions that team.cpp exports, each named headway_..."""


def _open(path: Path) -> ctypes.CDLL:
    dll = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(dll, f"headway_{name}")
        function.restype, function.argtypes = result, arguments
    return dll


def _kernels(dll: ctypes.CDLL) -> Iterator[Kernel]:
    handle = dll.headway_next_kernel(None)
    while handle:
        pairs = [field.split(":") for field in dll.headway_kernel_fields(handle).decode().split()]
        fields, kinds = zip(*pairs, strict=True)
        name = dll.headway_kernel_name(handle).decode()
        yield Kernel(name, dll.headway_kernel_body(handle), fields, kinds)
        handle = dll.headway_next_kernel(handle)


class Team:
    """Threads that run instructions together. The calling thread is one of them; calls must not overlap.

    `pinned` ties each other thread to a core of its own. The caller's affinity is left alone, since
    threads that it starts later would inherit it.
    """

    def __init__(self, library: Library, num_threads: int, *, pinned: bool = False) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; a team has at least 1")
        handle = library.dll.headway_team_create(num_threads, pinned)
        if not handle:
            raise OSError(f"{num_threads} threads cannot be started")
        self.library = library
        self.num_threads = num_threads
        self._handle = handle
        self._end = weakref.finalize(self, library.dll.headway_team_destroy, handle)
        # When the process ends the threads just go with it, whatever they are doing.
        self._end.atexit = False

    def run(self, words: npt.NDArray[np.int64]) -> None:
        """Run instructions that lie one after another in `words`; the interpreter is free meanwhile."""
        assert words.dtype == np.int64
        assert words.flags.c_contiguous
        assert self._end.alive
        self.library.dll.headway_team_run(self._handle, words.ctypes.data, len(words))

    def call(self, name: str, **arguments: Argument) -> None:
        """Run one kernel."""
        self.run_all([self.library.kernels[name].encode(arguments)])

    def run_all(self, instructions: Sequence[list[int]]) -> None:
        """Run encoded instructions."""
        self.run(np.array([word for each in instructions for word in each], dtype=np.int64))

    def close(self) -> None:
        """End the threads; closing twice is no error."""
        self._end()
