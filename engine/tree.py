"""DraftTree, the tokens proposed for one sequence in one step, and Drafter, who proposes them.

Knows nothing of how drafts are made or verified.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from headway.engine.config import MAX_NODES
from headway.engine.sequence import Sequence


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of a sequence. Node 0, the root, is its last token; the rest are drafts.

    Example, root "the" with drafts "cat" -> "sat", "dog" and, under "cat", "ran":

        node             0      1      2      3      4
        token           the    cat    dog    sat    ran
        parents         -1      0      0      1      1
        depths           0      1      1      2      2
        ancestor_masks 0b1   0b11  0b101 0b1011 0b10011   (bit j: node j is seen)

    Nodes are in breadth-first order, so a parent comes before its children. Node i is computed at
    position root + depths[i] and its key and value go to slot root + i; once a path is accepted they
    move to slot root + depth (KVCache.move) and need no new rotation.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    survivals: tuple[float, ...] | None = field(default=None, compare=False)
    """The drafter's own estimate, for each node, of the chance that all drafts down to it are
    accepted; the root's is 1. None where it has none. What a tree proposes is its tokens, so trees
    with the same tokens are equal."""

    @classmethod
    def root_only(cls, token_id: int) -> "DraftTree":
        """The tree of plain decoding."""
        return cls((token_id,), (-1,))

    @classmethod
    def chain(cls, root_id: int, draft_ids: Seq[int]) -> "DraftTree":
        """One path of drafts, no branches."""
        return cls((root_id, *draft_ids), tuple(range(-1, len(draft_ids))))

    @property
    def num_drafted(self) -> int:
        return len(self.token_ids) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    @cached_property
    def ancestor_masks(self) -> tuple[int, ...]:
        """For each node, bit j set where node j is itself or an ancestor; unsigned, 64 bits."""
        masks: list[int] = []
        for node, parent in enumerate(self.parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        return tuple(masks)

    def keep(self, nodes: Seq[int]) -> "DraftTree":
        """The tree of some of the nodes: ascending, the root and every node's parent among them."""
        if len(nodes) == len(self.token_ids):
            return self
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        return DraftTree(
            tuple(self.token_ids[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
            self.survivals and tuple(self.survivals[node] for node in nodes),
        )

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that holds `token_id`."""
        for candidate in range(node + 1, len(self.token_ids)):
            if self.parents[candidate] == node and self.token_ids[candidate] == token_id:
                return candidate
        return None

    def branch(self, node: int) -> list[int]:
        """The drafted tokens from the root's child down to `node`; empty for the root."""
        ids: list[int] = []
        while node > 0:
            ids.append(self.token_ids[node])
            node = self.parents[node]
        return ids[::-1]

    def check(self, max_drafted: int) -> None:
        """Raise AssertionError unless this is a legal tree of at most `max_drafted` drafts."""
        assert len(self.token_ids) == len(self.parents) <= min(MAX_NODES, max_drafted + 1)
        assert self.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(self.parents) if node)
        assert list(self.depths) == sorted(self.depths)
        assert self.survivals is None or len(self.survivals) == len(self.token_ids)


def num_drafted(trees: Iterable[DraftTree]) -> int:
    """Rows that the drafts of a step take."""
    return sum(tree.num_drafted for tree in trees)


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens of one sequence whose keys and values became final in a step.

    `hidden` [n, hidden size] holds the model's last hidden states (after its final norm) of the last
    n computed positions of `sequence`, or None where the drafter needs none.
    """

    sequence: Sequence
    hidden: torch.Tensor | None


class Drafter(Protocol):
    """Proposes trees. A drafter can only change speed: what it proposes is verified."""

    name: str
    """The label of its metrics."""
    needs_hidden: bool
    """Whether `observe` must be given hidden states."""

    def propose(self, sequences: Seq[Sequence], max_drafted: Seq[int]) -> list[DraftTree]:
        """Draft for each sequence a tree under its last token, of at most `max_drafted[i]` drafts."""
        ...

    def observe(self, commits: Seq[Commit]) -> None:
        """Take note of what a step made final, prompt chunks included."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that ended."""
        ...
