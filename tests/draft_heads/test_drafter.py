from collections.abc import Callable

import pytest
import torch

from headway.draft_heads.drafter import HydraDrafter
from headway.draft_heads.hydra import HydraHeads
from headway.draft_heads.tree_shape import EIGHT_NODES, TreeShape
from headway.engine.request import Request, StoppingParams
from headway.engine.sequence import Sequence
from headway.engine.tree import Commit, Drafter, DraftTree
from tiny import VOCAB_SIZE

MakeHeads = Callable[..., HydraHeads]
BUSHY = TreeShape.of(
    [*((rank,) for rank in range(5)), (0, 0), (0, 1), (3, 0), (0, 1, 0), (0, 1, 1)]
)


def sequence_of(tokens: list[int], num_pending: int = 1) -> Sequence:
    request = Request(f"request of {tokens}", tuple(tokens), StoppingParams(8))
    sequence = Sequence(request, arrived=0.0)
    sequence.num_computed = len(tokens) - num_pending
    return sequence


def observed(drafter: HydraDrafter, num_sequences: int) -> list[Sequence]:
    """Sequences whose last hidden states, random ones, the drafter knows."""
    generator = torch.Generator().manual_seed(5)
    sequences = [sequence_of([9, 11 + i, 20 + 3 * i]) for i in range(num_sequences)]
    drafter.observe([Commit(s, torch.randn(2, 32, generator=generator)) for s in sequences])
    return sequences


def brute_force(heads: HydraHeads, hidden: torch.Tensor, root: int, shape: TreeShape) -> DraftTree:
    """Each node on its own: its branch's logits from the start, its rank in their order."""
    tokens = [root]
    for node in range(1, len(shape.parents)):
        branch, parent = [], shape.parents[node]
        while parent >= 0:
            branch.insert(0, tokens[parent])
            parent = shape.parents[parent]
        frontier = heads.begin(hidden[None], torch.tensor(branch[:1]), heads.config.num_heads)
        for token in branch[1:]:
            frontier = heads.extend(frontier, slice(None), torch.tensor([token]))
        order = heads.logits(frontier)[0].argsort(descending=True)
        tokens.append(int(order[shape.ranks[node]]))
    return DraftTree(tuple(tokens), shape.parents)


@pytest.mark.parametrize("shape", [TreeShape.chain(5), TreeShape.chain(1), EIGHT_NODES, BUSHY])
def test_each_node_holds_the_token_of_its_rank(make_heads: MakeHeads, shape: TreeShape) -> None:
    heads = make_heads(5, shape)
    drafter = HydraDrafter(heads)
    sequence = observed(drafter, 1)[0]
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(5))[-1]
    [tree] = drafter.propose([sequence], [63])
    assert tree == brute_force(heads, hidden, sequence.tokens[-1], shape)


def test_a_node_survives_as_often_as_the_heads_say(make_heads: MakeHeads) -> None:
    heads = make_heads(5, EIGHT_NODES)
    drafter = HydraDrafter(heads)
    sequence = observed(drafter, 1)[0]
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(5))[-1]
    [tree] = drafter.propose([sequence], [63])
    assert tree.survivals is not None
    frontier = heads.begin(hidden[None], torch.tensor(tree.token_ids[:1]), 5)
    first = heads.logits(frontier)[0].softmax(-1)
    second = heads.logits(heads.extend(frontier, slice(None), torch.tensor(tree.token_ids[1:2])))
    assert tree.survivals[0] == 1.0
    assert tree.survivals[2] == pytest.approx(first[tree.token_ids[2]].item())
    grandchild = tree.parents.index(1)
    expected = first[tree.token_ids[1]] * second[0].softmax(-1)[tree.token_ids[grandchild]]
    assert tree.survivals[grandchild] == pytest.approx(expected.item())


@pytest.mark.parametrize("shape", [TreeShape.chain(5), EIGHT_NODES, BUSHY])
def test_a_budget_keeps_the_first_nodes(make_heads: MakeHeads, shape: TreeShape) -> None:
    drafter = HydraDrafter(make_heads(5, shape))
    [sequence] = observed(drafter, 1)
    [full] = drafter.propose([sequence], [len(shape.paths)])
    for budget in range(len(shape.paths) + 3):
        [tree] = drafter.propose([sequence], [budget])
        tree.check(budget)
        kept = min(budget, len(shape.paths)) + 1
        assert tree == DraftTree(full.token_ids[:kept], full.parents[:kept])
        assert all(0 <= token < VOCAB_SIZE for token in tree.token_ids)


@pytest.mark.parametrize("shape", [TreeShape.chain(5), EIGHT_NODES, BUSHY])
def test_a_batch_equals_one_by_one(make_heads: MakeHeads, shape: TreeShape) -> None:
    drafter = HydraDrafter(make_heads(5, shape))
    sequences = observed(drafter, 5)
    unknown = sequence_of([30, 31])
    sequences.insert(2, unknown)
    budgets = [8, 3, 8, 0, 1, 6]
    trees = drafter.propose(sequences, budgets)
    assert trees == [
        drafter.propose([s], [budget])[0] for s, budget in zip(sequences, budgets, strict=True)
    ]
    assert trees[2] == DraftTree.root_only(31)
    assert trees[3].num_drafted == 0
    assert trees[0].num_drafted == min(8, len(shape.paths))


def test_the_newest_hidden_state_is_used(make_heads: MakeHeads) -> None:
    drafter = HydraDrafter(make_heads(4))
    [sequence] = observed(drafter, 1)
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(6)) * 3
    drafter.observe([Commit(sequence, states)])
    newest = drafter.propose([sequence], [4])
    drafter.observe([Commit(sequence, states[2:])])
    assert drafter.propose([sequence], [4]) == newest
    drafter.observe([Commit(sequence, states[:1])])
    assert drafter.propose([sequence], [4]) != newest


def test_a_forgotten_sequence_gets_its_root_alone(make_heads: MakeHeads) -> None:
    drafter = HydraDrafter(make_heads(4))
    kept, dropped = observed(drafter, 2)
    drafter.forget(dropped)
    drafter.forget(dropped)  # ending twice is no error
    trees = drafter.propose([kept, dropped], [4, 4])
    assert [tree.num_drafted for tree in trees] == [4, 0]


def test_a_prompt_that_is_not_computed_gets_its_root_alone(make_heads: MakeHeads) -> None:
    drafter = HydraDrafter(make_heads(4))
    sequence = sequence_of([9, 10, 11, 12], num_pending=2)
    drafter.observe([Commit(sequence, torch.ones(2, 32))])
    assert drafter.propose([sequence], [4]) == [DraftTree.root_only(12)]


def test_hidden_states_are_demanded(make_heads: MakeHeads) -> None:
    drafter: Drafter = HydraDrafter(make_heads(4))
    assert drafter.needs_hidden
    with pytest.raises(ValueError, match="no hidden states"):
        drafter.observe([Commit(sequence_of([9, 10]), None)])
