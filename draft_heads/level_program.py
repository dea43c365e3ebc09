"""Program: instructions of the native team that are told how many rows there are when they run.

Knows the kernels' arguments, nothing of heads.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from headway.kernels.cpu.library import Argument, Team
from headway.kernels.linear import output_head_scratch_bytes
from headway.kernels.packed import FORMATS, PackedWeight
from headway.kernels.pointwise import MAX_DIMS, indexed

Call = tuple[str, dict[str, Argument]]
"""A kernel's name and its arguments."""

ROW_COUNTS = ("num_rows", f"size{MAX_DIMS - 2}")
"""Fields that hold the number of rows."""


class Program:
    """The instructions of a level, and where its results come."""

    def __init__(self, num_rows: int, num_best: int, weight: PackedWeight, team: Team) -> None:
        num_bytes = output_head_scratch_bytes(
            num_rows, weight.num_outputs, num_best, team.num_threads
        )
        self.values = np.zeros((num_rows, num_best), np.float32)
        self.indices = np.zeros((num_rows, num_best), np.int64)
        self.log_sums = np.zeros(num_rows, np.float32)
        self._scratch = torch.zeros(num_bytes, dtype=torch.uint8)
        self._words = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)
        """Where in the words the number of rows stands."""

    def results(self) -> dict[str, Argument]:
        """Arguments of output_head."""
        arrays = {"values": self.values, "indices": self.indices, "log_sums": self.log_sums}
        named = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {**named, "scratch": self._scratch}

    def encode(self, team: Team, calls: Seq[Call]) -> None:
        """Set the instructions; memory that they name must outlive the program."""
        words: list[int] = []
        counts: list[int] = []
        for name, arguments in calls:
            kernel = team.library.kernels[name]
            first = len(words) + 2
            counts += [first + at for at, field in enumerate(kernel.fields) if field in ROW_COUNTS]
            words += kernel.encode(arguments)
        self._words, self._counts = np.array(words, np.int64), np.array(counts)

    def run(self, team: Team, num_rows: int) -> None:
        """Run on the first rows."""
        self._words[self._counts] = num_rows
        team.run(self._words)


def quantise(x: Tensor, num_inputs: int, out: Tensor) -> Call:
    """Call quantise_rows on the first `num_inputs` of rows x."""
    return "quantise_rows", {
        "x": x, "x_stride": x.stride(0), "index": None, "num_rows": 0, "num_inputs": num_inputs,
        "out": out,
    }  # fmt: skip


def product(x: Tensor, weight: PackedWeight) -> dict[str, Argument]:
    """Return the leading arguments of linear and output_head; x: float32, or bytes of quantise_rows."""
    is_quantised = x.dtype == torch.uint8
    return {
        "x": x, "x_stride": 0 if is_quantised else x.stride(0), "index": None, "num_rows": 0,
        "quantised": int(is_quantised), "weight": weight.data,
        "format": FORMATS[weight.format].number, "num_outputs": weight.num_outputs,
        "num_inputs": weight.num_inputs,
    }  # fmt: skip


def pointwise(operation: int, out: Tensor, a: Tensor, b: Tensor | None = None) -> Call:
    """Call pointwise on float32 [rows, H] of any stride from row to row."""
    strides: dict[str, Argument] = {}
    for name, tensor in (("out", out), ("a", a), ("b", b)):
        row = 0 if tensor is None else tensor.stride(0)
        strides |= {name: tensor, f"{name}_type": 0}
        strides |= indexed(f"{name}_stride", [0, 0, 0, row, int(tensor is not None)])
    return "pointwise", {
        "operation": operation, "scalar": 0.0, **strides, **indexed("size", [1, 1, 1, 0, out.shape[1]]),
    }  # fmt: skip
