"""TreeShape: which ranks a drafter tries under every node, before any token is known.

Knows nothing of heads or tokens; engine/tree.py's DraftTree is a shape with tokens in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from headway.engine.config import MAX_NODES

Ranks = tuple[int, ...]
"""A node, named by the ranks on the way down to it."""


@dataclass(frozen=True)
class TreeShape:
    """A static tree of drafts in rank form: path (0, 1) is the second best child of the best child.

    Example, (0) (1) (0,0) (0,1) (1,0), in breadth-first order under a root that is node 0:

        node      0    1     2     3       4       5
        path     ()   (0)   (1)   (0,0)   (0,1)   (1,0)
        parents  -1    0     0     1       1       2
        ranks    -1    0     1     0       1       0
        levels        range(1, 3)  range(3, 6)

    Raises ValueError where a node lacks its parent or its better-ranked sibling.
    """

    paths: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        if list(self.paths) != sorted(set(self.paths), key=lambda path: (len(path), path)):
            raise ValueError(
                "tree: paths must be unique and in breadth-first order; use TreeShape.of"
            )
        if len(self.paths) >= MAX_NODES:
            raise ValueError(
                f"tree: has {len(self.paths)} nodes; at most {MAX_NODES - 1} are allowed"
            )
        known = {(), *self.paths}
        for path in self.paths:
            if not path or path[-1] < 0:
                raise ValueError(f"tree: {path} is no node; a path is a list of ranks from 0 up")
            needed = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
            if needed not in known:
                raise ValueError(f"tree: node {path} needs node {needed}; add it or drop {path}")

    @classmethod
    def of(cls, paths: Iterable[Iterable[int]]) -> "TreeShape":
        """Make a shape from paths in any order."""
        unique = {tuple(path) for path in paths}
        return cls(tuple(sorted(unique, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, num_nodes: int) -> "TreeShape":
        """One path of best children."""
        return cls(tuple((0,) * depth for depth in range(1, num_nodes + 1)))

    @property
    def num_levels(self) -> int:
        return len(self.paths[-1]) if self.paths else 0

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node; -1 for the root."""
        node_of = {path: node for node, path in enumerate(((), *self.paths))}
        return (-1, *(node_of[path[:-1]] for path in self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each node under its parent; -1 for the root."""
        return (-1, *(path[-1] for path in self.paths))

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The nodes of each depth, from 1 down."""
        starts = [1]
        for depth in range(1, self.num_levels + 1):
            starts.append(starts[-1] + sum(len(path) == depth for path in self.paths))
        return tuple(range(a, b) for a, b in pairwise(starts))

    @cached_property
    def inner(self) -> frozenset[int]:
        """The nodes that have children."""
        return frozenset(self.parents[1:])

    @cached_property
    def width(self) -> int:
        """The most children that one node has."""
        return max(self.ranks) + 1

    def prefix(self, num_nodes: int) -> "TreeShape":
        """Keep the first nodes in breadth-first order; what stays is connected."""
        return TreeShape(self.paths[:num_nodes])


EIGHT_NODES = TreeShape.of(
    [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]
)
"""The best tree of eight for heads that are right about 7 times in 10; five levels deep."""
