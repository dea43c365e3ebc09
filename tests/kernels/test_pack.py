"""Packed weights lie as packed.py says, give back what was packed, and join without change."""

import pytest
import torch

from headway.kernels.pack import (
    allocate,
    concatenate,
    interleave,
    joinable,
    pack,
    take_outputs,
    unpack,
    unpack_rows,
)
from headway.kernels.packed import FORMATS, FormatName, PackedWeight
from packed_weights import random_weight

PACKED: list[FormatName] = ["f32", "bf16", "q4_1", "q8"]
# Values are drawn from a normal distribution; error relative to their size.
ROUNDING = {"f32": 0.0, "bf16": 0.002, "q4_1": 0.078, "q8": 0.006}


def matrix(num_outputs: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_outputs, num_inputs, generator=generator) * 0.05


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("size", [(1, 1), (16, 32), (17, 33), (50, 64), (3, 259), (4000, 300)])
def test_floats_come_back_within_rounding(format: FormatName, size: tuple[int, int]) -> None:
    given = matrix(*size)
    weight = pack(given, format)
    assert weight.data.shape == (
        -(-size[0] // 16),
        -(-size[1] // FORMATS[format].block),
        FORMATS[format].block_bytes,
    )
    assert weight.data.is_contiguous()
    assert weight.data.data_ptr() % 64 == 0
    found = unpack(weight)
    assert found.shape == size
    if size[0] > 100:
        assert (found - given).norm() <= ROUNDING[format] * given.norm()
    assert (found - given).abs().max() <= 10 * ROUNDING[format] * given.abs().max()


@pytest.mark.parametrize("format", PACKED)
def test_what_is_not_a_value_is_zero(format: FormatName) -> None:
    """5 outputs, 33 inputs: 11 lanes and most of a block are room."""
    weight = pack(matrix(5, 33) + 1, format)
    whole = PackedWeight(format, 16, weight.num_blocks * FORMATS[format].block, weight.data)
    assert not unpack(whole)[5:].any()
    if format != "q4_1":  # whose rounding fits a line to all of the block
        assert not unpack(whole)[:, 33:].any()


def test_the_example_in_the_layout() -> None:
    """packed.py: q4_1, output 3, input 22 is the high half of byte 142, its step in bytes 6 and 7."""
    given = torch.zeros(16, 32)
    given[3, 0], given[3, 22] = 15.0, 9.0
    (block,) = pack(given, "q4_1").data[0]
    assert block[142] >> 4 == 9
    assert block[64 + 3 * 4] == 15
    assert block[64:].count_nonzero() == 2
    assert block[6:8].view(torch.float16) == 1.0
    assert block[38:40].view(torch.float16) == 0.0


def test_the_place_of_a_byte_code_and_of_a_float() -> None:
    given = torch.zeros(32, 64)
    given[16 + 3, 32 + 22] = 127.0
    block = pack(given, "q8").data[1, 1]
    assert block[32 + 5 * 64 + 3 * 4 + 2] == 255
    assert (
        pack(given, "f32").data[1, 54].view(torch.float32).tolist()
        == [0.0] * 3 + [127.0] + [0.0] * 12
    )
    assert pack(given, "bf16").data[1, 27].view(torch.bfloat16)[2 * 3] == 127.0


def test_searching_for_the_step_pays() -> None:
    """Against the plain way: from the least to the largest value in fifteen steps."""
    given = matrix(512, 256)
    blocks = given.view(512, -1, 32)
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / 15).half().float()
    low = low.half().float()
    plain = ((blocks - low) / step).round().clamp(0, 15) * step + low
    ours = unpack(pack(given, "q4_1"))
    assert (ours - given).norm() < 0.95 * (plain.view_as(given) - given).norm()


@pytest.mark.parametrize("format", ["q4_1", "q8"])
def test_blocks_of_equal_values_stay(format: FormatName) -> None:
    given = torch.tensor([[0.0] * 32 + [0.5] * 32 + [-3.0] * 32])
    assert torch.equal(unpack(pack(given, format)), given) or format == "q8"
    torch.testing.assert_close(unpack(pack(given, format)), given, rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [1e9, float("inf"), float("nan")])
@pytest.mark.parametrize("format", ["q4_1", "q8"])
def test_values_that_no_step_can_hold_are_refused(format: FormatName, value: float) -> None:
    given = matrix(2, 32)
    given[1, 7] = value
    with pytest.raises(ValueError, match="larger values, or ones that are not finite"):
        pack(given, format)


def test_a_format_without_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="as f32, bf16, q4_1 or q8, not as 'q4_k'"):
        pack(matrix(2, 32), "q4_k")


@pytest.mark.parametrize("format", FORMATS)
def test_rows_and_panels_are_those_of_the_whole(format: FormatName) -> None:
    weight = allocate(format, 70, 100)
    torch.manual_seed(1)
    weight.data.random_(0, 60)
    whole = unpack(weight)
    rows = torch.tensor([69, 0, 33, 33])
    assert torch.equal(unpack_rows(weight, rows), whole[rows])
    assert torch.equal(unpack(weight, 1, 2), whole[16:48])
    assert torch.equal(unpack(weight, 4), whole[64:])


@pytest.mark.parametrize("format", PACKED)
def test_joined_weights_are_their_values_side_by_side(format: FormatName) -> None:
    one, two = matrix(32, 40), matrix(9, 40, seed=1)
    weights = [pack(one, format), pack(two, format)]
    assert joinable(weights)
    joined = concatenate(weights)
    assert (joined.num_outputs, joined.num_inputs) == (41, 40)
    assert torch.equal(unpack(joined), torch.cat([unpack(weight) for weight in weights]))


def test_interleaved_panels_alternate() -> None:
    gate, up = pack(matrix(48, 40), "q8"), pack(matrix(48, 40, seed=1), "q8")
    joined = unpack(interleave(gate, up)).view(3, 2, 16, 40)
    assert torch.equal(joined[:, 0].reshape(48, 40), unpack(gate))
    assert torch.equal(joined[:, 1].reshape(48, 40), unpack(up))


def test_what_does_not_join_is_refused() -> None:
    odd, other, wide = pack(matrix(9, 40), "q8"), pack(matrix(16, 40), "f32"), matrix(16, 41)
    for weights in ([odd, odd], [other, odd], [pack(wide, "f32"), other]):
        assert not joinable(weights)
        with pytest.raises(ValueError, match="multiple of 16 outputs"):
            concatenate(weights)
    with pytest.raises(ValueError, match="gate has 16 outputs and up 32"):
        interleave(other, pack(matrix(32, 40), "f32"))


@pytest.mark.parametrize("format", FORMATS)
def test_outputs_are_taken_to_the_bit(format: FormatName) -> None:
    weight = random_weight(format, 50, 71)
    rows = torch.tensor([49, 0, 17, 17, 16, 31, *range(20, 35)])
    taken = take_outputs(weight, rows)
    assert (taken.format, taken.num_outputs, taken.num_inputs) == (format, len(rows), 71)
    assert torch.equal(unpack(taken), unpack(weight)[rows])
    again = take_outputs(taken, torch.arange(len(rows)))
    assert torch.equal(again.data, taken.data)
    assert torch.equal(take_outputs(weight, torch.arange(48)).data, weight.data[:3])


def test_what_is_not_taken_is_zero() -> None:
    taken = take_outputs(random_weight("f32", 40, 3), torch.tensor([39]))
    assert not unpack(PackedWeight("f32", 16, 3, taken.data))[1:].any()
