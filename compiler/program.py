"""Calls of kernels with open words, and Program, which fills them in and runs all in one native call.

Knows no model and no kernel: lower.py makes calls, memory.py says where buffers lie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headway.compiler.graph import Dim
from headway.kernels.cpu.library import Argument, Team


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that lives while a step runs."""

    name: str
    row_bytes: int
    rows: Dim = 1
    group: int = 1
    """Rows that are written together: their number is rounded up to a multiple of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a byte of a buffer."""

    buffer: str
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Open:
    """A word that is known when a step runs: an open size, or the address of an input."""

    name: str


Word = Argument | Place | Open


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel and its arguments by name."""

    kernel: str
    arguments: Mapping[str, Word]

    @property
    def buffers(self) -> set[str]:
        """The buffers it reads or writes."""
        return {word.buffer for word in self.arguments.values() if isinstance(word, Place)}


@dataclass(frozen=True, slots=True)
class Output:
    """Where a result lies: rows of `width` elements, one after another."""

    place: Place
    rows: Dim
    width: int
    dtype: torch.dtype = torch.float32


class Program:
    """A list of calls as one array of words, and the memory it works in."""

    def __init__(
        self,
        calls: Sequence[Call],
        arena: torch.Tensor,
        offsets: Mapping[str, int],
        outputs: Mapping[str, Output],
        max_sizes: Mapping[str, int],
        team: Team,
    ) -> None:
        """arena: uint8; offsets: where in it each buffer begins; max_sizes: what it has room for.

        Constants in calls are kept alive.
        """
        self.calls = tuple(calls)
        self._arena = arena
        self._offsets = offsets
        self.outputs = outputs
        self._max_sizes = max_sizes
        self._team = team
        self._open: list[str] = sorted(
            {w.name for call in calls for w in call.arguments.values() if isinstance(w, Open)}
        )
        words: list[int] = []
        positions: list[int] = []
        sources: list[int] = []
        for call in calls:
            kernel = team.library.kernels[call.kernel]
            for index, field in enumerate(kernel.fields):
                word = call.arguments.get(field)
                if isinstance(word, Open):
                    positions.append(len(words) + 2 + index)
                    sources.append(self._open.index(word.name))
            words += kernel.encode({key: self._fixed(w) for key, w in call.arguments.items()})
        self._words = np.array(words, dtype=np.int64)
        self._positions = np.array(positions, dtype=np.int64)
        self._sources = np.array(sources, dtype=np.int64)

    def run(self, sizes: Mapping[str, int], inputs: Mapping[str, torch.Tensor]) -> None:
        """Run every call. inputs: contiguous tensors, read where they lie; nothing is allocated.

        A name that the caller leaves out of both is a null pointer: an output that is not wanted.
        Raises ValueError for a size that the arena has no room for.
        """
        for name, most in self._max_sizes.items():
            if not 0 <= sizes[name] <= most:  # the kernels check nothing
                raise ValueError(f"{name} is {sizes[name]}; the program has room for {most}")
        values = [
            inputs[name].data_ptr() if name in inputs else sizes.get(name, 0) for name in self._open
        ]
        self._words[self._positions] = np.array(values, dtype=np.int64)[self._sources]
        self._team.run(self._words)

    def output(self, name: str, num_rows: int) -> torch.Tensor:
        """Rows of a result, [num_rows, width]: a view that the next run overwrites."""
        output = self.outputs[name]
        start = self._offsets[output.place.buffer] + output.place.offset_bytes
        size = num_rows * output.width * output.dtype.itemsize
        return self._arena[start : start + size].view(output.dtype).view(num_rows, output.width)

    def _fixed(self, word: Word) -> Argument:
        """The word as far as it is known now."""
        if isinstance(word, Open):
            return 0  # until it is patched
        if isinstance(word, Place):
            return self._arena.data_ptr() + self._offsets[word.buffer] + word.offset_bytes
        return word
