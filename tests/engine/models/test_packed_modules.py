"""Packed modules are nn.Linear and nn.Embedding on the unpacked weights."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from headway.engine.models.packed_modules import PackedEmbedding, PackedLinear, embedding_scale
from headway.kernels.pack import pack, unpack


def matrix() -> torch.Tensor:
    return torch.randn(37, 70, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("biased", [False, True])
def test_linear(biased: bool) -> None:
    weight, bias, x = pack(matrix(), "q4_1"), torch.linspace(-1, 1, 37), matrix()[:5]
    theirs = nn.Linear(70, 37, bias=biased).requires_grad_(False)
    theirs.weight.copy_(unpack(weight))
    if biased:
        theirs.bias.copy_(bias)
    ours = PackedLinear(weight, bias if biased else None, "fp32")
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert "37, q4_1, fp32" in repr(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 8.37])
def test_embedding(dtype: torch.dtype, scale: float) -> None:
    weight, ids = pack(matrix(), "q8"), torch.tensor([[36, 0, 5]])
    theirs = Gemma3TextScaledWordEmbedding(37, 70, 0, scale).to(dtype).requires_grad_(False)
    theirs.weight.copy_(unpack(weight))
    found = PackedEmbedding(weight, dtype, scale)(ids)
    assert found.dtype == dtype
    assert torch.equal(found, theirs(ids))


def test_an_embedding_that_does_more_is_left_alone() -> None:
    class OtherEmbedding(nn.Embedding):
        pass

    assert embedding_scale(nn.Embedding(3, 4)) == 1.0
    assert embedding_scale(Gemma3TextScaledWordEmbedding(3, 4, 0, 2.5)) == 2.5
    assert embedding_scale(OtherEmbedding(3, 4)) is None
    assert embedding_scale(nn.Embedding(3, 4, max_norm=1.0)) is None


def test_a_captured_model_has_one_node_for_each() -> None:
    weight = pack(matrix(), "q8")
    model = nn.Sequential(
        PackedEmbedding(weight, torch.float32), PackedLinear(weight, None, "int8")
    )
    program = torch.export.export(
        model,
        (torch.zeros(1, 4, dtype=torch.int64),),
        dynamic_shapes=({1: torch.export.Dim("rows")},),
    )
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called == ["headway.embedding.default", "headway.linear.default"]
