"""Each contract is one operator of torch: right in eager mode, one node when captured."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway.kernels import ops
from headway.kernels.pack import pack, unpack
from headway.kernels.packed import FormatName


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("format", ["f32", "bf16", "q4_1", "q8"])
@pytest.mark.parametrize("size", [(37, 70), (16, 32), (1500, 1000)])
def test_linear_is_the_product_with_the_unpacked_matrix(
    format: FormatName, size: tuple[int, int]
) -> None:
    weight, x, bias = pack(random(*size), format), random(2, 3, size[1]), random(size[0])
    found = ops.linear(x, weight.data, format, *size, bias, "fp32")
    torch.testing.assert_close(found, F.linear(x, unpack(weight), bias), rtol=1e-5, atol=1e-4)


def test_activations_are_rounded_by_blocks_of_32() -> None:
    x = random(3, 70)
    x[1, 32:64] = 0.0
    rounded = torch.empty_like(x)
    for row in range(3):
        for start in (0, 32, 64):
            block = x[row, start : start + 32]
            step = max(abs(value) for value in block.tolist()) / 127
            codes = [round(value / step) if step else 0 for value in block.tolist()]
            rounded[row, start : start + 32] = torch.tensor([code * step for code in codes])
    weight = pack(random(37, 70), "q8")
    found = ops.linear(x, weight.data, "q8", 37, 70, None, "int8")
    torch.testing.assert_close(found, rounded @ unpack(weight).T, rtol=1e-5, atol=1e-4)
    assert (found - x @ unpack(weight).T).abs().max() > 1e-3


@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_float_weights_leave_activations_whole(format: FormatName) -> None:
    weight, x = pack(random(37, 70), format), random(3, 70)
    outputs = [ops.linear(x, weight.data, format, 37, 70, None, kind) for kind in ("int8", "fp32")]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("activations", ["int8", "fp32"])
def test_no_rows_give_no_rows(activations: ops.Activations) -> None:
    """A step whose sequences only fill their prompts wants no logits."""
    weight = pack(random(37, 70), "q8")
    found = ops.linear(random(1, 0, 70), weight.data, "q8", 37, 70, None, activations)
    assert found.shape == (1, 0, 37)
    ids = torch.empty(1, 0, dtype=torch.int64)
    assert ops.embedding(ids, weight.data, "q8", 37, 70).shape == (1, 0, 70)


def test_linear_keeps_the_type_of_its_input() -> None:
    weight, x = pack(random(37, 70), "q8"), random(3, 70).bfloat16()
    found = ops.linear(x, weight.data, "q8", 37, 70, None, "fp32")
    assert torch.equal(found, F.linear(x.float(), unpack(weight)).bfloat16())


def test_embedding_gives_the_rows() -> None:
    weight = pack(random(37, 70), "q4_1")
    ids = torch.tensor([[36, 0], [5, 5]])
    found = ops.embedding(ids, weight.data, "q4_1", 37, 70)
    assert torch.equal(found, unpack(weight)[ids])


def attention_arguments() -> list[Any]:
    """Two sequences of a span of two and one drafted node each, an empty cache of blocks of 4."""

    def integers(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return [
        random(1, 4, 6, 8),
        random(1, 2, 6, 8, seed=1),
        random(1, 2, 6, 8, seed=2),
        torch.zeros(3, 2, 8, 2, 8),
        integers(0, 1, 2, 4, 5, 6),
        torch.tensor([[0], [1]], dtype=torch.int32),
        integers(0, 3, 6, dtype=torch.int32),
        integers(0, 0, dtype=torch.int32),
        integers(2, 2, dtype=torch.int32),
        integers(0, 1, 2, 0, 1, 2),
        integers(0, 1, 3, 0, 1, 3),
        1,
        4,
        0.3,
        None,
        None,
    ]


def test_attention_writes_one_layer_and_attends_to_it() -> None:
    arguments = attention_arguments()
    query, key, value, cache = arguments[:4]
    found = ops.attention(*arguments)
    assert torch.equal(cache[1, 0, [0, 1, 2, 4, 5, 6]], key[0].transpose(0, 1))
    assert torch.equal(cache[1, 1, [0, 1, 2, 4, 5, 6]], value[0].transpose(0, 1))
    assert not cache[[0, 2]].any()
    for rows in (slice(0, 3), slice(3, 6)):
        expected = F.scaled_dot_product_attention(
            query[:, :, rows],
            key[:, :, rows],
            value[:, :, rows],
            is_causal=True,
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(found[:, rows], expected.transpose(1, 2))


def test_torch_can_capture_each() -> None:
    weight = pack(random(37, 70), "q8")
    checks: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.linear, (random(3, 70), weight.data, "q8", 37, 70, random(37), "int8")),
        (ops.embedding, (torch.tensor([[1, 2]]), weight.data, "q8", 37, 70)),
        (ops.attention, tuple(attention_arguments())),
    ]
    for operator, arguments in checks:
        torch.library.opcheck(
            operator,
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
