"""A file of weights, packed and plain, that is mapped into memory and used where it lies.

It is a safetensors file in which every tensor starts at a multiple of 64 bytes: the header is
filled up with spaces, and entries named padding.N lie between tensors. The header's metadata says
which entries are packed:

    {"packed": '{"lm_head.weight": ["q8", 49152, 576]}'}     format, outputs, inputs

Knows no models.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.engine.errors import ModelLoadError
from headway.engine.models.cache import Progress
from headway.kernels.memory import ALIGNMENT_BYTES
from headway.kernels.pack import data_shape
from headway.kernels.packed import FormatName, PackedWeight

Weight = torch.Tensor | PackedWeight

_PADDING = "padding."
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """One weight of a file to be written."""

    shape: tuple[int, ...]
    """As the model has it."""
    kind: FormatName | torch.dtype
    """How it is packed, or else its type."""
    make: Callable[[], Weight]
    """Called when its turn comes, so that one weight at a time is in memory."""

    @property
    def entry(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of what is stored."""
        if isinstance(self.kind, torch.dtype):
            return self.kind, self.shape
        return torch.uint8, data_shape(self.kind, *self.shape)

    @property
    def num_bytes(self) -> int:
        """What it takes in the file and in memory."""
        dtype, shape = self.entry
        return torch.Size(shape).numel() * dtype.itemsize


def write_weights(path: Path, plan: Mapping[str, PlannedWeight], progress: Progress) -> None:
    """Make every weight of the plan, one after another, and write it."""
    header = _header(plan)
    total_bytes = sum(weight.num_bytes for weight in plan.values())
    done_bytes = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, planned in plan.items():
            made = planned.make()
            value = made.data if isinstance(made, PackedWeight) else made.contiguous()
            assert (value.dtype, tuple(value.shape)) == planned.entry, name
            file.write(value.view(-1).view(torch.uint8).numpy().data)
            file.write(bytes(-value.nbytes % ALIGNMENT_BYTES))
            done_bytes += planned.num_bytes
            progress("pack", done_bytes, total_bytes)


def read_weights(path: Path) -> dict[str, Weight]:
    """Map the file and return its weights; pages are read when they are touched.

    Raises:
        ModelLoadError: the file is damaged or cannot be read.
    """
    weights: dict[str, Weight] = {}
    try:
        with safe_open(path, framework="pt") as file:
            packed: dict[str, Any] = json.loads(file.metadata()["packed"])
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                if name.startswith(_PADDING):
                    continue
                value = file.get_tensor(name)
                weights[name] = value
                if name in packed:
                    weights[name] = _packed_weight(packed[name], value)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path} is not a whole file of packed weights: {error}") from error
    return weights


def _packed_weight(kind: tuple[FormatName, int, int], data: torch.Tensor) -> PackedWeight:
    format, num_outputs, num_inputs = kind
    expected = data_shape(format, num_outputs, num_inputs)
    if data.dtype != torch.uint8 or data.shape != expected:
        raise ValueError(f"{format} weights of shape {tuple(data.shape)}, not {expected}")
    return PackedWeight(format, num_outputs, num_inputs, data)


def _header(plan: Mapping[str, PlannedWeight]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
        nonlocal offset
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes

    for name, planned in plan.items():
        dtype, shape = planned.entry
        add(name, _DTYPE_NAMES[dtype], shape, planned.num_bytes)
        if room := -offset % ALIGNMENT_BYTES:
            add(f"{_PADDING}{len(entries)}", "U8", (room,), room)
    packed = {
        name: [planned.kind, *planned.shape]
        for name, planned in plan.items()
        if not isinstance(planned.kind, torch.dtype)
    }
    header = json.dumps({"__metadata__": {"packed": json.dumps(packed)}, **entries}).encode()
    return header + b" " * (-(8 + len(header)) % ALIGNMENT_BYTES)
