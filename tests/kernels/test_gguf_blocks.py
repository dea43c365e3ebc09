"""Packed GGUF blocks have bit for bit the values that the gguf package reads in them."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from headway.kernels.gguf_blocks import BLOCK_TYPES, pack_blocks
from headway.kernels.pack import unpack

# Where a block has float16 numbers.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(name: str, num_rows: int, num_blocks: int) -> np.ndarray:
    """Random bytes, finite scales of either sign; some are zero and some subnormal."""
    rng = np.random.default_rng(num_rows)
    shape = (num_rows, num_blocks, BLOCK_TYPES[name].num_bytes)
    blocks = rng.integers(0, 256, shape, np.uint8)
    for place in SCALES[name]:
        scales = rng.standard_normal(shape[:2]).astype(np.float16)
        scales[rng.random(shape[:2]) < 0.1] = 0.0
        scales[rng.random(shape[:2]) < 0.1] *= np.float16(1e-6)
        blocks[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("size", [(1, 1), (16, 2), (37, 3), (5000, 1)])
def test_every_value_is_kept(name: str, size: tuple[int, int]) -> None:
    rows = random_blocks(name, *size)
    rows.flags.writeable = False  # as a view of a file
    weight = pack_blocks(rows, name)
    expected = np.array(gguf.dequantize(rows, Type[name]))
    assert (weight.format, weight.num_outputs, weight.num_inputs) == (
        BLOCK_TYPES[name].format,
        *expected.shape,
    )
    assert np.array_equal(unpack(weight).numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("name", "format"), [("F32", "f32"), ("F16", "f32"), ("BF16", "bf16")])
def test_floats_are_kept(name: str, format: str) -> None:
    values = np.random.default_rng(0).standard_normal((19, 33)).astype(np.float32)
    rows = gguf.quantize(values, Type[name]).view(np.uint8)
    weight = pack_blocks(rows, name)
    assert weight.format == format
    assert torch.equal(unpack(weight), torch.from_numpy(gguf.dequantize(rows, Type[name])))
