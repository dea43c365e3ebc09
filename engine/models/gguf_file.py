"""GGUF files as they lie on disk: metadata, and tensors as raw blocks until someone dequantises.

Knows no model architecture. The header is read here because the gguf package takes 12 seconds for
a vocabulary of 262,144 tokens; its tables and its dequantisers are used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize

from headway.engine.errors import ModelLoadError

READABLE_TYPES = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT_BYTES = 32
_MAX_DIMS = 4
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as the file holds it.

    `blocks` [..., bytes of a row] uint8 is a view of the file: rows of Q4_1, for example, are runs
    of 20-byte blocks (a scale and a minimum in float16, then 32 values of 4 bits), so a tensor of
    shape [576, 1536] has blocks of shape [576, 960].
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """As torch has it: rows first."""
    blocks: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The metadata of a GGUF file and its tensors, which stay on disk until they are read."""

    path: Path
    metadata: Mapping[str, Any]
    """Numbers, strings, booleans and lists of them: what the key says."""
    tensors: Mapping[str, RawTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file and find its tensors.

    Raises:
        ModelLoadError: the file is not GGUF, is of another version or byte order, is cut short, or
            holds a tensor of a type that cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelLoadError(f"{path} cannot be read: {error}. Give a GGUF file.") from error
    cursor = _Cursor(data, path)
    num_tensors, num_values = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value()
    places = [_read_place(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"general.alignment is {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {place.name: _view(cursor, place, start) for place in places}
    return GGUFFile(path, metadata, tensors)


def read_tensor(tensor: RawTensor) -> torch.Tensor:
    """Return the tensor's values, in the smallest dtype that holds each of them exactly.

    F16 and BF16 keep their dtype. Blocks become float32: a product of an 11-bit scale and an 8-bit
    value needs 19 bits, more than float16 or bfloat16 have.
    """
    if tensor.type is GGMLQuantizationType.BF16:
        return torch.from_numpy(tensor.blocks.copy()).view(torch.bfloat16)
    if tensor.type is GGMLQuantizationType.F16:
        return torch.from_numpy(tensor.blocks.copy()).view(torch.float16)
    values = dequantize(tensor.blocks, tensor.type)
    return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Place:
    """What the header says of a tensor; `offset` counts from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int


class _Cursor:
    """A place in the header, moved by reading; every read checks that the file goes that far."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = 0

    def damaged(self, reason: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path} is damaged: {reason} (near byte {self.offset}). Download it again."
        )

    def take(self, num_bytes: int) -> int:
        """Move on by `num_bytes` and return the place before."""
        if num_bytes > len(self.data) - self.offset:
            raise ModelLoadError(
                f"{self.path} is cut short: its header needs at least "
                f"{self.offset + num_bytes} bytes and the file has {len(self.data)}. Download it "
                "again."
            )
        before = self.offset
        self.offset += num_bytes
        return before

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        # The size is checked before the form is built: a damaged count may be astronomical.
        place = self.take(count * struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{count}{form}", self.data, place)

    def string(self) -> str:
        (length,) = self.numbers("Q")
        place = self.take(length)
        try:
            return self.data[place : place + length].decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"a string is not UTF-8: {error.reason}") from error

    def value(self) -> Any:
        return self._value_of(self._type())

    def _type(self) -> GGUFValueType:
        (number,) = self.numbers("I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.damaged(f"there is no metadata type {number}") from error

    def _value_of(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.numbers(_SCALARS[kind])[0]
        kind = self._type()
        (count,) = self.numbers("Q")
        if kind in _SCALARS:
            return list(self.numbers(_SCALARS[kind], count))
        if kind is GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        raise self.damaged("its metadata nests arrays")


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata values."""
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise ModelLoadError(
            f"{cursor.path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'. Give a GGUF "
            "file, or a folder in Hugging Face's format."
        )
    cursor.take(4)
    (version,) = cursor.numbers("I")
    if version & 0xFFFF == 0:
        raise ModelLoadError(
            f"{cursor.path} is a big-endian GGUF file; only little-endian ones can be read. "
            "Convert the model anew, without --bigendian."
        )
    if version not in _VERSIONS:
        raise ModelLoadError(
            f"{cursor.path} is GGUF version {version}; versions 2 and 3 can be read. Convert the "
            "model anew with a current llama.cpp."
        )
    num_tensors, num_values = cursor.numbers("Q", 2)
    return num_tensors, num_values


def _read_place(cursor: _Cursor) -> _Place:
    name = cursor.string()
    (num_dims,) = cursor.numbers("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.damaged(f"tensor {name} has {num_dims} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", num_dims)))
    (type_number,) = cursor.numbers("I")
    (offset,) = cursor.numbers("Q")
    try:
        kind = GGMLQuantizationType(type_number)
    except ValueError:
        kind = None
    if kind not in READABLE_TYPES:
        raise ModelLoadError(
            f"{cursor.path}: tensor {name} is of type {kind.name if kind else type_number}, which "
            f"cannot be read; {', '.join(t.name for t in READABLE_TYPES)} can. Take another "
            "quantisation of the model, such as Q4_K_M or Q8_0."
        )
    return _Place(name, shape, kind, offset)


def _view(cursor: _Cursor, place: _Place, start: int) -> RawTensor:
    values_per_block, bytes_per_block = GGML_QUANT_SIZES[place.type]
    if place.shape[-1] % values_per_block:
        raise cursor.damaged(
            f"tensor {place.name} has rows of {place.shape[-1]} values, not a multiple of the "
            f"{values_per_block} in a block of {place.type.name}"
        )
    row_bytes = place.shape[-1] // values_per_block * bytes_per_block
    num_bytes = math.prod(place.shape[:-1]) * row_bytes
    first = start + place.offset
    if first + num_bytes > len(cursor.data):
        raise ModelLoadError(
            f"{cursor.path} is cut short: tensor {place.name} ends at byte {first + num_bytes} and "
            f"the file has {len(cursor.data)}. Download it again."
        )
    flat = np.frombuffer(cursor.data, np.uint8, num_bytes, first)
    return RawTensor(
        place.name, place.type, place.shape, flat.reshape(*place.shape[:-1], row_bytes)
    )
