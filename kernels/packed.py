"""PackedWeight: a matrix [outputs, inputs] in the layout that the native products read.

Says how bits lie; kernels/pack.py writes them, kernels/linear.py multiplies with them.

A matrix of N outputs and K inputs is cut into panels of 16 outputs; N is padded to a multiple of 16
and K to a multiple of the format's block, with zeros. The panels follow one another, and within a
panel its blocks along k; so a product with one panel reads memory front to back.

A block of a quantised format holds, for 16 outputs and `block` inputs, in this order:

    scales     16 x float16 or float32: the step d of each output
    minimums   16 x the same type, only if the format has them: the value m of code 0
    codes      for j = 0 .. block/4 - 1, for each output: the codes of inputs 4j .. 4j+3, a byte each
               (64 bytes for one j: a vector register, a row of an AMX tile). With 4-bit codes
               bytes j and j + block/8 share one: j in the low, j + block/8 in the high four bits

    value = d * code + m      with minimums
    value = d * (code - zero) without

A block of a float format is one input: 16 x float32, or two inputs: 16 x (bfloat16 of k, of k + 1).

Example, q4_1, output 3, input 22 of block 0 of panel 0: bytes 0-31 scales (bytes 6-7 are output 3's),
bytes 32-63 minimums (38-39). Input 22 is in group j = 5, place 2; j - 4 = 1, so its code is the high
half of byte 64 + 1 * 64 + 3 * 4 + 2 = 142.
"""

from dataclasses import dataclass
from typing import Literal

import torch

LANES = 16
"""Outputs in a panel."""

FormatName = Literal["f32", "bf16", "q4_0", "q4_1", "q8", "q4_k", "q8_1", "q8_k", "q6_k"]


@dataclass(frozen=True, slots=True)
class Format:
    """One row of the table of layouts."""

    number: int
    """What the native kernels call it."""
    code_bits: int
    block: int
    """Inputs that share a scale."""
    zero: int = 0
    scale_bytes: int = 0
    has_minimum: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of 16 outputs and `block` inputs."""
        scales = LANES * self.scale_bytes * (2 if self.has_minimum else 1)
        return scales + LANES * self.block * self.code_bits // 8


FORMATS: dict[FormatName, Format] = {
    "f32": Format(0, code_bits=32, block=1),
    "bf16": Format(1, code_bits=16, block=2),
    # GGUF Q4_0
    "q4_0": Format(2, code_bits=4, block=32, zero=8, scale_bytes=2),
    # GGUF Q4_1; --quantize int4
    "q4_1": Format(3, code_bits=4, block=32, scale_bytes=2, has_minimum=True),
    # GGUF Q8_0 and Q5_0 (codes are unsigned: value + 128); --quantize int8
    "q8": Format(4, code_bits=8, block=32, zero=128, scale_bytes=2),
    # GGUF Q4_K: its products of two scales need float32 to stay exact
    "q4_k": Format(5, code_bits=4, block=32, scale_bytes=4, has_minimum=True),
    # GGUF Q5_1
    "q8_1": Format(6, code_bits=8, block=32, scale_bytes=2, has_minimum=True),
    # GGUF Q5_K
    "q8_k": Format(7, code_bits=8, block=32, scale_bytes=4, has_minimum=True),
    # GGUF Q6_K
    "q6_k": Format(8, code_bits=8, block=16, zero=32, scale_bytes=4),
}
"""Every layout. Codes are unsigned bytes or halves of one."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [num_outputs, num_inputs]; y = x W^T."""

    format: FormatName
    num_outputs: int
    num_inputs: int
    data: torch.Tensor
    """[num_panels, num_blocks, block_bytes] uint8, contiguous, 64-byte aligned."""

    @property
    def num_blocks(self) -> int:
        return -(-self.num_inputs // FORMATS[self.format].block)
