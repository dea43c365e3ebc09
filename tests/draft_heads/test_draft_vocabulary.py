import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from headway.draft_heads.data import IGNORED, Example
from headway.draft_heads.draft_vocabulary import (
    check_draft_ids,
    coverage,
    most_frequent,
    narrowed,
    places_of,
)
from headway.engine.models.packed_modules import PackedLinear
from headway.kernels.ops import Activations
from headway.kernels.packed import FORMATS, FormatName
from packed_weights import random_weight
from tiny import VOCAB_SIZE

TEXT = [
    Example((50, 9, 9, 9, 8, 8, 7), (False, *[True] * 6)),
    Example((50, 50, 8, 20), (False, False, True, True)),
]
"""Learnt: 8 and 9 three times each, 7 and 20 once, 50 never."""


@pytest.mark.parametrize(
    ("num_tokens", "always", "expected"),
    [
        (1, [], [8]),
        (2, [], [8, 9]),
        (3, [], [7, 8, 9]),
        (3, [2], [2, 8, 9]),  # the end of an answer, though no text holds it
        (2, [30, 2], [2, 30]),
        (6, [], [0, 1, 7, 8, 9, 20]),  # more than the text has: low ids come first
    ],
)
def test_the_most_frequent_tokens_are_kept(
    num_tokens: int, always: list[int], expected: list[int]
) -> None:
    found = most_frequent(TEXT, num_tokens, always, VOCAB_SIZE)
    assert found is not None
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@pytest.mark.parametrize("num_tokens", [0, 64, 8192])
def test_all_tokens_need_no_list(num_tokens: int) -> None:
    assert most_frequent(TEXT, num_tokens, [2], VOCAB_SIZE) is None


def test_coverage_counts_what_is_learnt() -> None:
    assert coverage(torch.tensor([8, 9, 50]), TEXT) == 6 / 8
    assert coverage(None, TEXT) == 1
    assert coverage(torch.tensor([8]), []) == 1


def test_the_example_of_the_docstring() -> None:
    labels = torch.tensor([[2, 6, 9], [5, IGNORED, 63]])
    expected = [[0, IGNORED, 2], [1, IGNORED, IGNORED]]
    assert places_of(labels, torch.tensor([2, 5, 9])).tolist() == expected
    assert places_of(labels, None) is labels


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 9, 64], "has ids from 3 to 64; the model's tokens are 0 to 63"),
        ([-1, 9, 20], "has ids from -1 to 20"),
        ([3, 20, 9, 30], "has 9 after 20 at place 2; ids must ascend"),
        ([3, 3, 9], "has 3 after 3 at place 1; ids must ascend, none twice"),
        ([3], "has 1 tokens; the tree tries 2"),
        ([[3, 4]], r"is torch.int64 \(1, 2\)"),
        ([0.5, 4.0], "is torch.float32"),
    ],
)
def test_a_wrong_list_is_refused(ids: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=f"draft_ids: {message}"):
        check_draft_ids(torch.tensor(ids), VOCAB_SIZE, 2)


def test_a_good_list_is_not() -> None:
    check_draft_ids(torch.tensor([0, 5, 63]), VOCAB_SIZE, 3)


IDS = torch.tensor([0, 5, 17, 18, 63])


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_of_floats_keeps_its_rows(bias: bool) -> None:
    head = nn.Linear(32, VOCAB_SIZE, bias)
    part = narrowed(head, IDS)
    x = torch.randn(3, 32)
    torch.testing.assert_close(part(x), head(x)[:, IDS])
    assert not any(parameter.requires_grad for parameter in part.parameters())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activations", ["int8", "fp32"])
def test_a_packed_head_keeps_its_rows(format: FormatName, activations: Activations) -> None:
    bias = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    head = PackedLinear(random_weight(format, VOCAB_SIZE, 32), bias, activations)
    part = narrowed(head, IDS)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(part(x), head(x)[:, IDS])


def test_a_head_of_an_unknown_class_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"is a LlamaMLP.* draft_vocab_size 0"):
        narrowed(model.model.layers[0].mlp, IDS)
