"""What a step costs is what the tiny model's tensors say, and the bound is the slower of two."""

import pytest
import torch
from torch import nn

from headway.server.roofline import Bound, MachineRates, ModelWork, measure_rates, model_work
from tiny import VOCAB_SIZE, tiny_model

LAYER = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64
"""Weights of a layer's products: queries and outputs, keys and values, the gated products."""
NORMS = 5 * 32


@pytest.mark.parametrize(
    ("is_tied", "num_weights"),
    [(False, 2 * LAYER + NORMS + VOCAB_SIZE * 32), (True, 2 * LAYER + NORMS + VOCAB_SIZE * 32)],
    ids=["the embedding is not read", "the embedding is the head"],
)
def test_work_of_the_tiny_model(is_tied: bool, num_weights: int) -> None:
    model = tiny_model(tie_word_embeddings=is_tied)
    work = model_work(model)
    frequencies = sum(buffer.nbytes for buffer in model.buffers())
    assert work.weight_bytes == 4 * num_weights + frequencies
    assert work.multiply_adds == 2 * LAYER + VOCAB_SIZE * 32
    assert work.cache_bytes == 2 * 2 * 2 * 8 * 4
    assert work.attention_multiply_adds == 2 * 2 * 4 * 8
    assert work.arithmetic == "float32"


@pytest.mark.parametrize(
    ("layout", "arithmetic"), [("q4_1", "int8"), ("f32", "float32"), ("bf16", "bfloat16")]
)
def test_packed_weights_count_as_they_are_held(layout: str, arithmetic: str) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.format, self.in_features, self.out_features = layout, 64, 32
            self.register_buffer("data", torch.zeros(700, dtype=torch.uint8))

    model = tiny_model()
    before = model_work(model)
    model.model.layers[0].mlp.down_proj = Packed()
    work = model_work(model)
    assert work.weight_bytes == before.weight_bytes - 4 * 32 * 64 + 700
    assert work.multiply_adds == before.multiply_adds
    for layer in model.model.layers:
        layer.mlp.down_proj = Packed()
    assert model_work(model).arithmetic == arithmetic


def test_the_example_of_model_work() -> None:
    work = ModelWork(10_000_000, 5_000_000, 1000, 2000, "float32")
    assert work.step_bytes(2 * 50) == 10_100_000
    assert work.step_multiply_adds(3, 50) == 3 * 5_100_000


def test_the_bound_is_the_slower() -> None:
    assert Bound(1.0, 1.0, memory_ms=2.0, compute_ms=1.0).ms == 2.0
    assert Bound(1.0, 1.0, memory_ms=2.0, compute_ms=1.0).by == "memory"
    assert Bound(1.0, 1.0, memory_ms=2.0, compute_ms=3.0).by == "compute"


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16", "int8"])
def test_rates_are_measured(arithmetic: str) -> None:
    work = ModelWork(1, 1, 1, 1, arithmetic)  # type: ignore[arg-type]  # one of its three
    rates = measure_rates(work)
    assert isinstance(rates, MachineRates)
    assert rates.read_buffer_bytes == 64 << 20
    # Any processor of the last decade is between these.
    assert 1e8 < rates.read_bytes_per_second < 1e12
    assert 1e7 < rates.multiply_adds_per_second < 1e14
