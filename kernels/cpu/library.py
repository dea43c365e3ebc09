"""The compiled bodies as Python sees them: Library finds kernels, Team runs instructions.

Knows no kernel by name: what arguments a body takes is told by the library itself.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

Argument = torch.Tensor | int | float | None
"""A tensor stands for its address; None is a null pointer."""


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
        return value.data_ptr()
    assert value is None or isinstance(value, int)
    return value or 0


class Library:
    """A shared library of kernel bodies."""

    def __init__(self, path: Path) -> None:
        dll = ctypes.CDLL(str(path))
        self.dll = dll
        for name in ("next_kernel", "kernel_body", "team_create"):
            getattr(dll, f"headway_{name}").restype = ctypes.c_void_p
        for name in ("kernel_name", "kernel_fields"):
            getattr(dll, f"headway_{name}").restype = ctypes.c_char_p
        self.kernels: dict[str, Kernel] = {}
        handle = dll.headway_next_kernel(None)
        while handle:
            at = ctypes.c_void_p(handle)
            fields = [field.split(":") for field in dll.headway_kernel_fields(at).decode().split()]
            name = dll.headway_kernel_name(at).decode()
            self.kernels[name] = Kernel(
                name,
                dll.headway_kernel_body(at),
                tuple(field for field, _ in fields),
                tuple(kind for _, kind in fields),
            )
            handle = dll.headway_next_kernel(at)


class Team:
    """Threads that run instructions together. The calling thread is one of them; calls must not overlap."""

    def __init__(self, library: Library, num_threads: int, *, pinned: bool = False) -> None:
        self.library = library
        self.num_threads = num_threads
        self._handle = ctypes.c_void_p(library.dll.headway_team_create(num_threads, int(pinned)))

    def run(self, words: npt.NDArray[np.int64]) -> None:
        """Run instructions that lie one after another in `words`; the interpreter is free meanwhile."""
        assert words.dtype == np.int64 and words.flags.c_contiguous
        self.library.dll.headway_team_run(
            self._handle, ctypes.c_void_p(words.ctypes.data), ctypes.c_int64(len(words))
        )

    def call(self, name: str, **arguments: Argument) -> None:
        """Run one kernel."""
        self.run_all([self.library.kernels[name].encode(arguments)])

    def run_all(self, instructions: Sequence[list[int]]) -> None:
        """Run encoded instructions."""
        self.run(np.array([word for each in instructions for word in each], dtype=np.int64))

    def close(self) -> None:
        """End the threads."""
        if self._handle:
            self.library.dll.headway_team_destroy(self._handle)
            self._handle = ctypes.c_void_p(None)
