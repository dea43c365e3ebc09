"""DraftTree: the worked example of its docstring, and what it refuses."""

import pytest

from headway.engine.tree import DraftTree

EXAMPLE = DraftTree((10, 11, 12, 13, 14), (-1, 0, 0, 1, 1))


def test_the_worked_example() -> None:
    assert EXAMPLE.depths == (0, 1, 1, 2, 2)
    assert EXAMPLE.ancestor_masks == (0b1, 0b11, 0b101, 0b1011, 0b10011)
    assert EXAMPLE.num_drafted == 4
    assert EXAMPLE.branch(4) == [11, 14]
    assert EXAMPLE.branch(0) == []
    assert EXAMPLE.child(1, 14) == 4
    assert EXAMPLE.child(0, 14) is None


def test_a_chain_is_one_path() -> None:
    chain = DraftTree.chain(5, [6, 7, 8])
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.branch(3) == [6, 7, 8]
    assert DraftTree.chain(5, []) == DraftTree.root_only(5)


def test_some_nodes_can_be_kept() -> None:
    tree = DraftTree(EXAMPLE.token_ids, EXAMPLE.parents, (1.0, 0.6, 0.3, 0.5, 0.1))
    kept = tree.keep([0, 1, 4])
    assert kept == DraftTree((10, 11, 14), (-1, 0, 1))
    assert kept.survivals == (1.0, 0.6, 0.1)
    assert EXAMPLE.keep([0, 2]) == DraftTree((10, 12), (-1, 0))
    assert tree.keep([0]) == DraftTree.root_only(10)
    assert tree.keep(range(5)) is tree


@pytest.mark.parametrize(
    ("tree", "max_drafted"),
    [
        (EXAMPLE, 3),
        (DraftTree((1, 2), (-1,)), 5),
        (DraftTree((1, 2), (-1, 1)), 5),
        (DraftTree((1, 2, 3), (0, 0, 0)), 5),
        (DraftTree((1, 2, 3, 4), (-1, 0, 1, 0)), 5),
        (DraftTree.chain(0, range(64)), 100),
    ],
    ids=["over_budget", "lengths", "own_parent", "no_root", "not_breadth_first", "over_64"],
)
def test_check_refuses(tree: DraftTree, max_drafted: int) -> None:
    with pytest.raises(AssertionError):
        tree.check(max_drafted)


def test_check_passes_a_full_tree() -> None:
    DraftTree.chain(0, range(63)).check(63)
