"""What the suffix drafter drafts from texts whose continuations can be seen by eye."""

import random
from itertools import pairwise
from typing import Any

import pytest

from headway.engine.request import Request, StoppingParams
from headway.engine.sequence import Sequence
from headway.engine.suffix import SuffixConfig, SuffixDrafter
from headway.engine.tree import Commit, DraftTree


def sequence_of(token_ids: list[int], request_id: str = "r") -> Sequence:
    return Sequence(Request(request_id, tuple(token_ids), StoppingParams(max_new_tokens=99)), 0.0)


def draft(token_ids: list[int], max_drafted: int, config: SuffixConfig | None = None) -> DraftTree:
    """What a new drafter makes of a text."""
    [tree] = SuffixDrafter(config).propose([sequence_of(token_ids)], [max_drafted])
    tree.check(max_drafted)
    return tree


def random_text(length: int, alphabet: int = 3, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(alphabet) for _ in range(length)]


CHAIN = SuffixConfig(branching="chain")
ALL = SuffixConfig(min_survival=0.0)

# After 1 came 2 twice (then 8, then 7) and 3 once (then 6); no longer suffix occurred before.
FORKED = [1, 2, 8, 1, 2, 7, 1, 3, 6, 1]
# After 1 came 2 4 5 three times and 3 once, each time after another token.
STRONG_PATH = [1, 2, 4, 5, 10, 1, 2, 4, 5, 11, 1, 2, 4, 5, 12, 1, 3, 6, 13, 1]

CASES = {
    "nothing before": ([5], 8, None, [5], [-1]),
    "nothing repeats": ([5, 6, 7, 8], 8, None, [8], [-1]),
    "the docstring's": ([7, 8, 9, 7, 8], 8, None, [8, 9, 7, 8, 9, 7, 8], [-1, 0, 1, 2, 3, 4, 5]),
    "budget of one": ([7, 8, 9, 7, 8], 1, None, [8, 9], [-1, 0]),
    "no budget": ([7, 8, 9, 7, 8], 0, None, [8], [-1]),
    "both continuations": (FORKED, 8, None, [1, 2, 3], [-1, 0, 0]),
    "the frequent one alone": (FORKED, 1, None, [1, 2], [-1, 0]),
    "the chain takes the frequent one": (FORKED, 8, CHAIN, [1, 2], [-1, 0]),
    "level by level": (FORKED, 5, ALL, [1, 2, 3, 7, 8, 6], [-1, 0, 0, 1, 1, 2]),
    "a deep node before a weak one": (
        STRONG_PATH,
        3,
        SuffixConfig(min_survival=0.1),
        [1, 2, 4, 5],
        [-1, 0, 1, 2],
    ),
    "the weak one takes its place by depth": (
        STRONG_PATH,
        4,
        SuffixConfig(min_survival=0.1),
        [1, 2, 3, 4, 5],
        [-1, 0, 0, 1, 3],
    ),
    "equals: the latest": ([1, 2, 8, 1, 3, 9, 1], 1, None, [1, 3], [-1, 0]),
    "equals: the latest in a chain": ([1, 2, 8, 1, 3, 9, 1], 1, CHAIN, [1, 3], [-1, 0]),
    "the longest match decides": ([1, 2, 3, 8, 2, 4, 9, 1, 2], 1, None, [2, 3], [-1, 0]),
    "match too short": ([7, 8, 9, 8], 8, SuffixConfig(min_match=2), [8], [-1]),
    "match long enough": ([7, 8, 9, 7, 8], 1, SuffixConfig(min_match=2), [8, 9], [-1, 0]),
    "depth": ([7, 8, 9, 7, 8], 8, SuffixConfig(max_depth=2), [8, 9, 7], [-1, 0, 1]),
}


@pytest.mark.parametrize(
    ("token_ids", "max_drafted", "config", "nodes", "parents"), CASES.values(), ids=CASES.keys()
)
def test_drafts(
    token_ids: list[int],
    max_drafted: int,
    config: SuffixConfig | None,
    nodes: list[int],
    parents: list[int],
) -> None:
    assert draft(token_ids, max_drafted, config) == DraftTree(tuple(nodes), tuple(parents))


@pytest.mark.parametrize("period", [1, 2, 3, 5, 7])
def test_a_period_goes_on(period: int) -> None:
    text = [position % period for position in range(30 + period)]
    tree = draft(text, 13)
    assert tree == DraftTree.chain(
        text[-1], [position % period for position in range(len(text), len(text) + 13)]
    )


@pytest.mark.parametrize(("match", "drafted"), [(1, 5), (2, 11), (3, 16), (9, 16)])
def test_a_longer_match_drafts_more(match: int, drafted: int) -> None:
    """Survival after d drafts is L / (L + d), at least 0.15; depth is at most 16."""
    run = list(range(match))
    assert draft(run + list(range(100, 140)) + run, 63).num_drafted == drafted


@pytest.mark.parametrize("max_drafted", [0, 1, 2, 5, 16, 63])
@pytest.mark.parametrize("config", [None, CHAIN, ALL, SuffixConfig(min_match=3, max_depth=3)])
def test_trees_are_legal_and_end_in_what_the_text_holds(
    max_drafted: int, config: SuffixConfig | None
) -> None:
    for seed in range(9):
        text = random_text(31 + 7 * seed, seed=seed)
        tree = draft(text, max_drafted, config)
        assert tree.token_ids[0] == text[-1]
        children = list(zip(tree.parents, tree.token_ids, strict=True))
        assert len(set(children)) == len(children), "a parent has one child for each token"
        pairs = set(pairwise(text))
        for token_id, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
            assert (tree.token_ids[parent], token_id) in pairs
        if config is ALL and max_drafted <= config.max_depth:
            assert tree.num_drafted == max_drafted


@pytest.mark.parametrize("piece", [1, 3, 8])
def test_the_way_a_text_grew_does_not_matter(piece: int) -> None:
    text, drafter = random_text(101), SuffixDrafter()
    sequence = sequence_of(text[:11])
    for start in range(11, len(text), piece):
        drafter.propose([sequence], [8])
        drafter.observe([Commit(sequence, None)])
        sequence.extend(text[start : start + piece], eos_token_ids=())
    assert drafter.propose([sequence], [8]) == [draft(text, 8)]


def test_sequences_do_not_mix() -> None:
    texts = [random_text(length, seed=length) for length in (17, 5, 88)]
    sequences = [sequence_of(text, str(index)) for index, text in enumerate(texts)]
    trees = SuffixDrafter().propose(sequences, [8, 3, 5])
    expected = [draft(text, budget) for text, budget in zip(texts, [8, 3, 5], strict=True)]
    assert trees == expected
    assert any(tree.num_drafted for tree in expected)


def test_forget_leaves_nothing_behind() -> None:
    drafter = SuffixDrafter()
    first, second = sequence_of([1, 2, 3, 4, 1]), sequence_of([1, 9, 1])
    drafter.forget(first)
    assert drafter.propose([first], [1]) == [DraftTree.chain(1, [2])]
    drafter.forget(first)
    assert drafter.propose([second], [1]) == [DraftTree.chain(1, [9])]
    drafter.forget(second)
    assert drafter.propose([first], [1]) == [DraftTree.chain(1, [2])]


def test_a_long_prompt_is_indexed_over_steps_and_holds_up_no_short_one() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_indexed_tokens=20))
    long, short = sequence_of([1, 2] * 21, "long"), sequence_of([5, 6, 5], "short")
    drafted = []
    for _ in range(4):
        trees = drafter.propose([long, short], [2, 1])
        drafted.append([tree.num_drafted for tree in trees])
        short.extend([11 - short.tokens[-1]], eos_token_ids=())
    assert drafted == [[0, 1], [0, 1], [2, 1], [2, 1]]


def test_a_sequence_that_may_not_draft_costs_no_indexing() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_indexed_tokens=3))
    idle, busy = sequence_of([1], "idle"), sequence_of([5, 6, 5], "busy")
    assert drafter.propose([idle, busy], [0, 1]) == [
        DraftTree.root_only(1),
        DraftTree.chain(5, [6]),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_match": 0}, "min_match is 0; it must be at least 1"),
        ({"max_depth": 0}, "max_depth is 0; it must be at least 1"),
        ({"max_indexed_tokens": -1}, "max_indexed_tokens is -1; it must be at least 1"),
        ({"min_survival": 1.5}, "min_survival is 1.5; it is a chance, from 0 to 1"),
    ],
)
def test_settings_that_cannot_draft_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixConfig(**settings)
