"""DraftChances: estimates that are right at first, and become right where they are not."""

import random

import pytest

from headway.engine.draft_chances import DraftChances
from headway.engine.tree import DraftTree
from sampling_reference import sequence_of

SIX_TENTHS = DraftTree((1, 2), (-1, 0), (1.0, 0.6))


def test_at_first_the_drafter_is_believed() -> None:
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 0, 1), (1.0, 0.5, 0.25, 0.4))
    found = DraftChances().survivals(sequence_of([1]), tree)
    assert found == pytest.approx([1.0, 0.5, 0.25, 0.4])


def test_a_drafter_without_estimates() -> None:
    tree = DraftTree((0, 1, 2, 3, 4), (-1, 0, 0, 1, 1))
    found = DraftChances().survivals(sequence_of([1]), tree)
    assert found == pytest.approx([1.0, 0.5, 0.25, 0.25, 0.125])


def test_the_docstrings_example() -> None:
    chances, sequence = DraftChances(), sequence_of([1])
    for _ in range(5):
        chances.learn(sequence, SIX_TENTHS, (0,))
    assert round(sequence.draft_luck, 2) == -0.54
    assert round(chances.survivals(sequence, SIX_TENTHS)[1], 2) == 0.45
    chances.learn(sequence, SIX_TENTHS, (0, 1))
    assert round(chances.survivals(sequence, SIX_TENTHS)[1], 2) == 0.48


@pytest.mark.parametrize("truth", [0.1, 0.35, 0.9])
def test_all_sequences_learn_from_each_other(truth: float) -> None:
    rng, chances = random.Random(5), DraftChances()
    for _ in range(3_000):
        path = (0, 1) if rng.random() < truth else (0,)
        chances.learn(sequence_of([1]), SIX_TENTHS, path)
    [_, found] = chances.survivals(sequence_of([1]), SIX_TENTHS)
    assert found == pytest.approx(truth, abs=0.1)


def test_a_depth_is_judged_only_where_it_was_reached() -> None:
    chain = DraftTree.chain(1, [2, 3])
    chances = DraftChances()
    for _ in range(500):
        chances.learn(sequence_of([1]), chain, (0,))
    [_, first, second] = chances.survivals(sequence_of([1]), chain)
    assert first < 0.12
    assert second == pytest.approx(first * 0.5, rel=0.35)  # only the slope knows of depth 2
    for _ in range(500):
        chances.learn(sequence_of([1]), chain, (0, 1))
    shallow = chances.survivals(sequence_of([1]), chain)
    assert shallow[1] > 0.8
    assert shallow[2] < 0.15 * shallow[1]


def test_luck_fades_where_nothing_is_tried() -> None:
    chances, sequence = DraftChances(), sequence_of([1])
    for _ in range(50):
        chances.learn(sequence, SIX_TENTHS, (0,))
    unlucky = sequence.draft_luck
    for _ in range(35):
        chances.learn(sequence, DraftTree.root_only(1), (0,))
    assert unlucky < -1
    assert sequence.draft_luck == pytest.approx(unlucky / 2, rel=0.05)


@pytest.mark.parametrize("estimate", [0.0, 1e-9, 1.0])
def test_estimates_at_the_ends_are_no_error(estimate: float) -> None:
    tree = DraftTree((0, 1, 2), (-1, 0, 1), (1.0, estimate, estimate))
    chances, sequence = DraftChances(), sequence_of([1])
    for path in ((0,), (0, 1), (0, 1, 2)) * 50:
        chances.learn(sequence, tree, path)
    assert all(0 < chance <= 1 for chance in chances.survivals(sequence, tree))
