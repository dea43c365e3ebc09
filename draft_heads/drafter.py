"""HydraDrafter: drafts trees for the engine's sequences with Hydra heads.

Knows nothing of how the heads compute; proposals are only ranked here, the engine verifies them.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from headway.draft_heads.branches import Branches, TorchBranches
from headway.draft_heads.hydra import HydraHeads
from headway.draft_heads.native import NativeBranches
from headway.draft_heads.tree_shape import TreeShape
from headway.engine.sequence import Sequence
from headway.engine.tree import Commit, DraftTree
from headway.kernels.cpu.library import Team


class HydraDrafter:
    """Implements engine/tree.py's Drafter.

    Between steps it keeps one hidden state for each sequence, that of the newest computed position;
    the token after it is the root of the next tree.
    """

    name = "hydra"
    needs_hidden = True

    def __init__(self, heads: HydraHeads, team: Team | None = None) -> None:
        """team: the engine's threads; without them, and on a GPU, the heads run in torch."""
        self._branches: Branches = (
            TorchBranches(heads) if team is None else NativeBranches(heads, team)
        )
        shape = heads.config.tree
        self._prefixes = [shape.prefix(num_nodes) for num_nodes in range(len(shape.paths) + 1)]
        self._hidden: dict[Sequence, Tensor] = {}

    def propose(self, sequences: Seq[Sequence], max_drafted: Seq[int]) -> list[DraftTree]:
        """Draft for each sequence a tree under its last token, of at most `max_drafted[i]` drafts.

        A smaller tree is the first part, breadth first, of the full one. A sequence whose last
        hidden state is not known, or whose prompt is not computed yet, gets its root alone.
        """
        trees = [DraftTree.root_only(sequence.tokens[-1]) for sequence in sequences]
        shapes = [self._prefixes[min(num, len(self._prefixes) - 1)] for num in max_drafted]
        ready = [
            i
            for i, sequence in enumerate(sequences)
            if shapes[i].paths and sequence.num_pending == 1 and sequence in self._hidden
        ]
        if ready:
            drafted = self._draft([sequences[i] for i in ready], [shapes[i] for i in ready])
            for i, tree in zip(ready, drafted, strict=True):
                trees[i] = tree
        return trees

    def observe(self, commits: Seq[Commit]) -> None:
        """Keep the last hidden state of each sequence."""
        for sequence, hidden in ((commit.sequence, commit.hidden) for commit in commits):
            if hidden is None:
                raise ValueError(
                    f"request {sequence.request.request_id}: the hydra drafter was given no hidden "
                    "states; the engine must pass them to a drafter whose needs_hidden is true"
                )
            # A copy: a view would keep the hidden states of the whole step in memory.
            self._hidden[sequence] = hidden[-1].clone()

    def forget(self, sequence: Sequence) -> None:
        """Drop the hidden state of a sequence that ended or lost its cache blocks."""
        self._hidden.pop(sequence, None)

    def _draft(self, sequences: Seq[Sequence], shapes: Seq[TreeShape]) -> list[DraftTree]:
        """Fill the shapes with tokens, one level of all sequences at a time."""
        hidden = torch.stack([self._hidden[sequence] for sequence in sequences])
        tokens = [[sequence.tokens[-1]] for sequence in sequences]  # [sequence][node]
        survivals = [[1.0] for _ in sequences]  # [sequence][node]
        num_levels = max(shape.num_levels for shape in shapes)
        width = max(shape.width for shape in shapes)
        guesses = self._branches.begin(hidden, [ids[0] for ids in tokens], num_levels, width)
        row_of = {(i, 0): i for i in range(len(sequences))}  # (sequence, node): its branch's row
        for level in range(num_levels):
            parents: list[int] = []
            next_row_of: dict[tuple[int, int], int] = {}
            for i, shape in enumerate(shapes):
                for node in shape.levels[level] if level < shape.num_levels else ():
                    parent, rank = shape.parents[node], shape.ranks[node]
                    row = row_of[i, parent]
                    tokens[i].append(guesses.token_ids[row][rank])
                    survivals[i].append(survivals[i][parent] * guesses.chances[row][rank])
                    if node in shape.inner:
                        next_row_of[i, node] = len(parents)
                        parents.append(row)
            row_of = next_row_of
            if parents:
                guesses = self._branches.extend(parents, [tokens[i][node] for i, node in row_of])
        return [
            DraftTree(tuple(ids), shape.parents, tuple(chances))
            for ids, shape, chances in zip(tokens, shapes, survivals, strict=True)
        ]
