"""Packs the quantised blocks of GGUF files for the native products, code by code and exactly.

Knows blocks, not files; engine/models reads those. The layouts of the blocks are llama.cpp's
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).

Raw blocks come as [n, bytes of a block] uint8 and give codes [n, parts, block], scales [n, parts]
and minimums [n, parts], where a K-block of 256 values has 8 or 16 parts with scales of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headway.kernels.pack import Blocks, allocate, pack, row_chunks, write_blocks
from headway.kernels.packed import FormatName, PackedWeight


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of GGUF's types of quantised blocks."""

    format: FormatName
    num_values: int
    num_bytes: int
    read: Callable[[torch.Tensor], Blocks]


def pack_blocks(rows: npt.NDArray[np.uint8], type_name: str) -> PackedWeight:
    """Pack a matrix as GGUF has it: rows [N, bytes of a row] uint8, `type_name` such as "Q4_K".

    Every type of BLOCK_TYPES keeps its codes, scales and minimums; F32, F16 and BF16 become floats
    (F16 as f32). unpack() gives bit for bit what dequantising the blocks gives.
    """
    if type_name in _FLOAT_TYPES:
        dtype, format = _FLOAT_TYPES[type_name]
        return pack(torch.from_numpy(np.array(rows)).view(dtype), format)
    kind = BLOCK_TYPES[type_name]
    num_inputs = rows.shape[1] // kind.num_bytes * kind.num_values
    weight = allocate(kind.format, rows.shape[0], num_inputs)
    for chunk in row_chunks(weight):
        # Copied, because rows may be a read-only view of a file.
        raw = torch.from_numpy(np.array(rows[chunk])).view(-1, kind.num_bytes)
        codes, scales, minimums = kind.read(raw)
        num_rows = chunk.stop - chunk.start
        blocks = Blocks(
            codes.reshape(num_rows, weight.num_blocks, -1),
            scales.reshape(num_rows, -1),
            None if minimums is None else minimums.reshape(num_rows, -1),
        )
        write_blocks(weight, chunk.start, blocks)
    return weight


def _float16(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] -> codes [..., 2n]: all the low halves, then all the high ones."""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """Four bytes of bits, lowest first -> [n, 32], 16 where the bit is set."""
    bits = raw[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(1) << 4


def _read_q4_0(raw: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(raw[:, 2:]), _float16(raw[:, :2]), None)


def _read_q4_1(raw: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(raw[:, 4:]), _float16(raw[:, :2]), _float16(raw[:, 2:4]))


def _read_q5_0(raw: torch.Tensor) -> Blocks:
    """A code c stands for c - 16; ours, of eight bits, for c - 128."""
    codes = _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])
    return Blocks(codes + (128 - 16), _float16(raw[:, :2]), None)


def _read_q5_1(raw: torch.Tensor) -> Blocks:
    codes = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return Blocks(codes, _float16(raw[:, :2]), _float16(raw[:, 2:4]))


def _read_q8_0(raw: torch.Tensor) -> Blocks:
    """Signed bytes; with the sign bit flipped they are unsigned and 128 larger."""
    return Blocks(raw[:, 2:] ^ 128, _float16(raw[:, :2]), None)


def _k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums [n, 8] float32 from the first 16 bytes of Q4_K and Q5_K.

    d and dmin in float16, then twelve bytes of 6-bit factors. Factors 0 to 3 are the low six bits
    of bytes 0-3 (scales) and 4-7 (minimums); 4 to 7 have their low four bits in bytes 8-11, scales
    in the low half, and their high two in the top of bytes 0-3 and 4-7.
    """
    d, d_min = _float16(raw[:, :2]).float(), _float16(raw[:, 2:4]).float()
    scales, minimums, rest = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = torch.cat([scales & 63, rest & 15 | scales >> 2 & 48], dim=1)
    minimum = torch.cat([minimums & 63, rest >> 4 | minimums >> 2 & 48], dim=1)
    return d * scale, -(d_min * minimum)


def _read_q4_k(raw: torch.Tensor) -> Blocks:
    """Of each 32 bytes, the low halves are one part's codes and the high ones the next part's."""
    scales, minimums = _k_scales(raw)
    return Blocks(_nibbles(raw[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32), scales, minimums)


def _read_q5_k(raw: torch.Tensor) -> Blocks:
    """As Q4_K; bit p of byte i of the 32 after the scales is the fifth bit of part p's code i."""
    scales, minimums = _k_scales(raw)
    low = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    parts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = raw[:, None, 16:48] >> parts & 1
    return Blocks(low | high << 4, scales, minimums)


def _read_q6_k(raw: torch.Tensor) -> Blocks:
    """Two halves of 128 values: 64 bytes of low four bits, 32 bytes with four pairs of high bits.

    Values 0-63 of a half have the low halves of its bytes, 64-127 the high ones; pair p holds the
    high bits of values 32p to 32p + 31. Then 16 signed scales and d.
    """
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> pairs & 3
    scales = _float16(raw[:, 208:]).float() * raw[:, 192:208].view(torch.int8)
    return Blocks((low | high << 4).view(-1, 16, 16), scales, None)


BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType("q4_0", 32, 18, _read_q4_0),
    "Q4_1": BlockType("q4_1", 32, 20, _read_q4_1),
    "Q5_0": BlockType("q8", 32, 22, _read_q5_0),
    "Q5_1": BlockType("q8_1", 32, 24, _read_q5_1),
    "Q8_0": BlockType("q8", 32, 34, _read_q8_0),
    "Q4_K": BlockType("q4_k", 256, 144, _read_q4_k),
    "Q5_K": BlockType("q8_k", 256, 176, _read_q5_k),
    "Q6_K": BlockType("q6_k", 256, 210, _read_q6_k),
}
"""GGUF's types of quantised blocks, and the format that each is packed in."""

_FLOAT_TYPES: dict[str, tuple[torch.dtype, FormatName]] = {
    "F32": (torch.float32, "f32"),
    "F16": (torch.float16, "f32"),
    "BF16": (torch.bfloat16, "bf16"),
}
