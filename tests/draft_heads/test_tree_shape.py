import pytest

from headway.draft_heads.tree_shape import EIGHT_NODES, TreeShape

EXAMPLE = TreeShape.of([(1, 0), (0,), (0, 1), (1,), (0, 0)])


def test_the_example_of_the_docstring() -> None:
    assert EXAMPLE.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert EXAMPLE.parents == (-1, 0, 0, 1, 1, 2)
    assert EXAMPLE.ranks == (-1, 0, 1, 0, 1, 0)
    assert EXAMPLE.levels == (range(1, 3), range(3, 6))
    assert EXAMPLE.inner == {0, 1, 2}
    assert (EXAMPLE.num_levels, EXAMPLE.width) == (2, 2)


def test_chain_and_the_eight_nodes() -> None:
    assert TreeShape.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert TreeShape.chain(3).parents == (-1, 0, 1, 2)
    assert len(EIGHT_NODES.paths) == 8
    assert EIGHT_NODES.num_levels == 5


@pytest.mark.parametrize("num_nodes", range(9))
def test_a_prefix_is_a_legal_shape(num_nodes: int) -> None:
    prefix = EIGHT_NODES.prefix(num_nodes)
    assert prefix.paths == EIGHT_NODES.paths[:num_nodes]
    assert prefix.parents == EIGHT_NODES.parents[: num_nodes + 1]
    assert sum(len(level) for level in prefix.levels) == num_nodes


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0, 0)], r"\(0, 0\) needs node \(0,\)"),
        ([(0,), (2,)], r"\(2,\) needs node \(1,\)"),
        ([(-1,)], "no node"),
        ([()], "no node"),
        ([(0,) * depth for depth in range(1, 65)], "has 64 nodes; at most 63"),
    ],
)
def test_illegal_shapes_are_refused(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape.of(paths)


def test_paths_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="breadth-first"):
        TreeShape(((0, 0), (0,)))
