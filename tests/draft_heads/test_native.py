"""Heads on the native team rank as the heads in torch do, but for the rounding to eight bits."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from headway.draft_heads.branches import Branches, Guesses, TorchBranches
from headway.draft_heads.config import HydraConfig
from headway.draft_heads.hydra import HydraHeads, TargetEnds
from headway.draft_heads.native import NativeBranches
from headway.draft_heads.tree_shape import TreeShape
from headway.engine.models.packed_modules import PackedEmbedding, PackedLinear
from headway.kernels.cpu.library import Team
from headway.kernels.native import start_team
from headway.kernels.pack import pack
from headway.kernels.packed import FormatName
from tiny import VOCAB_SIZE, tiny_model

MakeHeads = Callable[..., HydraHeads]
IDS = (1, 2, 5, 6, 9, 17, 20, 33, 40, 41, 44, 47, 50, 51, 52, 61, 63)


def packed_model(format: FormatName, **changes: object) -> LlamaForCausalLM:
    """The tiny model with packed ends."""
    model = tiny_model(**changes)
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    model.set_input_embeddings(PackedEmbedding(pack(embed, format), torch.float32, scale=1.5))
    model.set_output_embeddings(PackedLinear(pack(head, format), None, "int8"))
    return model


TARGETS: dict[str, Callable[[], LlamaForCausalLM]] = {
    "floats": tiny_model,
    "bfloat16": lambda: tiny_model().to(torch.bfloat16),
    "q8": lambda: packed_model("q8"),
    "q4_1": lambda: packed_model("q4_1"),
    "bf16": lambda: packed_model("bf16"),
    "softcap": lambda: softcapped(),
}


def softcapped() -> LlamaForCausalLM:
    model = packed_model("q8")
    model.config.final_logit_softcapping = 2.0
    return model


def grown(branches: Branches, num_best: int) -> list[Guesses]:
    """Four levels, with rows dropped, reordered and taken twice, and in the end more than before."""
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))
    guesses = [branches.begin(hidden, [7, 8, 9], 4, num_best)]
    guesses.append(branches.extend([2, 0, 0, 1], [10, 11, 12, 13]))
    guesses.append(branches.extend([3, 1], [14, 63]))
    guesses.append(branches.extend([i % 2 for i in range(21)], list(range(20, 41))))
    return guesses


def assert_alike(found: list[Guesses], expected: list[Guesses]) -> None:
    """Chances agree within rounding; tokens where their chances are apart."""
    for ours, theirs in zip(found, expected, strict=True):
        chances, true_chances = torch.tensor(ours.chances), torch.tensor(theirs.chances)
        torch.testing.assert_close(chances, true_chances, rtol=0.1, atol=0.01)
        apart = true_chances[:, 0] - true_chances[:, 1] > 0.03
        for row in apart.nonzero()[:, 0].tolist():
            assert ours.token_ids[row][0] == theirs.token_ids[row][0]
    first_ids = [[row[0] for each in g for row in each.token_ids] for g in (found, expected)]
    same = sum(a == b for a, b in zip(*first_ids, strict=True))
    assert same >= 0.9 * len(first_ids[0])


@pytest.mark.parametrize("draft_ids", [None, IDS])
@pytest.mark.parametrize("target", TARGETS)
def test_native_heads_rank_as_those_in_torch(
    make_heads: MakeHeads, native_team: Team, target: str, draft_ids: tuple[int, ...] | None
) -> None:
    heads = make_heads(4, target=TARGETS[target](), draft_ids=draft_ids)
    if target == "bfloat16":
        heads = heads.to(torch.bfloat16)
    found = grown(NativeBranches(heads, native_team), 5)
    assert_alike(found, grown(TorchBranches(heads), 5))
    drafted = {token for each in found for row in each.token_ids for token in row}
    assert drafted <= set(draft_ids or range(VOCAB_SIZE))
    assert all(len(set(row)) == 5 for each in found for row in each.token_ids)


def test_heads_with_projections_of_their_own(make_heads: MakeHeads, native_team: Team) -> None:
    heads = make_heads(4, own_output_heads=True, draft_ids=IDS)
    assert_alike(grown(NativeBranches(heads, native_team), 2), grown(TorchBranches(heads), 2))


def test_a_head_with_a_bias(
    make_heads: MakeHeads, native_team: Team, model: LlamaForCausalLM
) -> None:
    head = nn.Linear(32, VOCAB_SIZE)
    head.bias.data.normal_(0, 3, generator=torch.Generator().manual_seed(4))
    model.set_output_embeddings(head.requires_grad_(False))
    heads = make_heads(4)
    assert_alike(grown(NativeBranches(heads, native_team), 2), grown(TorchBranches(heads), 2))


def test_odd_sizes(native_team: Team) -> None:
    """Hidden states of no whole block, sums of no whole panel."""
    model = tiny_model(hidden_size=36, vocab_size=51, num_attention_heads=2, num_key_value_heads=2)
    config = HydraConfig(36, 51, 4, TreeShape.chain(4))
    heads = HydraHeads(config, TargetEnds.of(model)).requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for parameter in heads.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    hidden = torch.randn(3, 36, generator=generator)
    for num_levels in (1, 2, 3, 4):
        both = []
        for branches in (NativeBranches(heads, native_team), TorchBranches(heads)):
            guesses = [branches.begin(hidden, [7, 8, 9], num_levels, 2)]
            guesses += [branches.extend([2, 1, 0], [i, 5, 50]) for i in range(1, num_levels)]
            both.append(guesses)
        assert_alike(*both)


def test_fewer_levels_and_other_widths_share_the_memory(
    make_heads: MakeHeads, native_team: Team
) -> None:
    """A draft is the same whatever was drafted before it, in whatever memory."""
    heads = make_heads(4)
    branches = NativeBranches(heads, native_team)
    hidden = torch.randn(40, 32, generator=torch.Generator().manual_seed(5))
    first = grown(branches, 5)
    branches.begin(hidden, list(range(20, 60)), 2, 1)
    branches.extend([39, 0], [5, 6])
    branches.begin(hidden[:1], [3], 1, 7)
    assert grown(branches, 5) == first
    assert grown(NativeBranches(heads, native_team), 5) == first


def test_a_row_does_not_depend_on_others_or_on_threads(make_heads: MakeHeads) -> None:
    heads = make_heads(4, draft_ids=IDS)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(6))
    answers = []
    for num_threads in (1, 2, 3):
        team = start_team("auto", num_threads)
        if team is None:
            pytest.skip("there are no native kernels on this machine")
        branches = NativeBranches(heads, team)
        all_rows = [branches.begin(hidden, [5, 6, 7, 8, 9], 2, 3), branches.extend([1, 3], [4, 5])]
        one = [branches.begin(hidden[3:4], [8], 2, 3), branches.extend([0], [5])]
        assert one[0].token_ids[0] == all_rows[0].token_ids[3]
        assert one[1].chances[0] == all_rows[1].chances[1]
        answers.append(all_rows)
        team.close()
    assert answers[0] == answers[1] == answers[2]
