from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from headway.draft_heads.config import HydraConfig
from headway.draft_heads.hydra import HydraHeads, TargetEnds
from headway.draft_heads.tree_shape import TreeShape
from tiny import VOCAB_SIZE

MakeHeads = Callable[..., HydraHeads]


def literal_features(heads: HydraHeads, level: int, hidden: Tensor, embeds: list[Tensor]) -> Tensor:
    """z of one head as the paper writes it: whole matrices times the whole concatenation."""
    size = heads.config.hidden_size

    def matrix(which: int) -> Tensor:
        blocks = []
        for place in range(level + 2):
            reader = level - max(0, place - 1)
            blocks.append(heads.inputs[place].weight.view(-1, 2, size, size)[reader, which])
        return torch.cat(blocks, dim=1)  # [H, (level + 2) H]

    residual_bias, gate_bias = heads.inputs[0].bias.view(-1, 2, size)[level]
    u = torch.cat([hidden, *embeds[: level + 1]], dim=-1)
    return u @ matrix(0).T + residual_bias + F.silu(u @ matrix(1).T + gate_bias)


@pytest.mark.parametrize("num_levels", [1, 2, 3])
def test_running_sums_equal_the_literal_concatenation(
    make_heads: MakeHeads, model: LlamaForCausalLM, num_levels: int
) -> None:
    heads = make_heads(3)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 32, generator=generator)
    ids = torch.randint(VOCAB_SIZE, (num_levels, 5), generator=generator)
    embeds = [model.get_input_embeddings()(row) for row in ids]

    frontier = heads.begin(hidden, ids[0], num_levels)
    for level in range(num_levels):
        if level:
            frontier = heads.extend(frontier, slice(None), ids[level])
        expected = literal_features(heads, level, hidden, embeds)
        torch.testing.assert_close(heads.features(frontier), expected, rtol=1e-4, atol=1e-4)
        logits = model.lm_head(expected)
        torch.testing.assert_close(heads.logits(frontier), logits, rtol=1e-4, atol=1e-4)


def test_branches_of_one_parent_keep_apart(make_heads: MakeHeads) -> None:
    heads = make_heads(3)
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(2))
    frontier = heads.begin(hidden, torch.tensor([8, 9]), 3)
    tree = heads.extend(frontier, torch.tensor([1, 0, 1]), torch.tensor([10, 11, 12]))
    for row, (parent, token) in enumerate([(1, 10), (0, 11), (1, 12)]):
        alone = heads.extend(frontier, slice(parent, parent + 1), torch.tensor([token]))
        torch.testing.assert_close(heads.logits(tree)[row], heads.logits(alone)[0])


def test_untrained_heads_start_from_the_target(model: LlamaForCausalLM) -> None:
    config = HydraConfig(32, VOCAB_SIZE, 2, TreeShape.chain(2))
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))
    root_ids = torch.tensor([7, 8, 9])
    shared = HydraHeads(config, TargetEnds.of(model))
    own = HydraHeads(HydraConfig(32, VOCAB_SIZE, 2, TreeShape.chain(2), True), TargetEnds.of(model))
    own.copy_output_head()
    for heads in (shared, own):
        frontier = heads.begin(hidden, root_ids, 2)
        torch.testing.assert_close(heads.logits(frontier), model.lm_head(hidden))


def test_only_heads_of_its_own_are_parameters(make_heads: MakeHeads) -> None:
    blocks = (3 + 3 + 2 + 1) * 2 * 32 * 32 + 3 * 2 * 32
    assert sum(p.numel() for p in make_heads(3).parameters()) == blocks
    own = make_heads(3, own_output_heads=True)
    assert sum(p.numel() for p in own.parameters()) == blocks + 3 * (32 + 1) * VOCAB_SIZE
