"""HydraDrafter: drafts trees for the engine's sequences with Hydra heads.

Knows nothing of how the heads compute; proposals are only ranked here, the engine verifies them.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from headway.draft_heads.hydra import HydraHeads
from headway.draft_heads.tree_shape import TreeShape
from headway.engine.sequence import Sequence
from headway.engine.tree import Commit, DraftTree


class HydraDrafter:
    """Implements engine/tree.py's Drafter.

    Between steps it keeps one hidden state for each sequence, that of the newest computed position;
    the token after it is the root of the next tree.
    """

    name = "hydra"
    needs_hidden = True

    def __init__(self, heads: HydraHeads) -> None:
        self._heads = heads
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

    @torch.inference_mode()
    def _draft(self, sequences: Seq[Sequence], shapes: Seq[TreeShape]) -> list[DraftTree]:
        """Fill the shapes with tokens, one level of all sequences at a time."""
        hidden = torch.stack([self._hidden[sequence] for sequence in sequences])
        tokens = [[sequence.tokens[-1]] for sequence in sequences]  # [sequence][node]
        survivals = [[1.0] for _ in sequences]  # [sequence][node]
        num_levels = max(shape.num_levels for shape in shapes)
        width = max(shape.width for shape in shapes)
        rows = [(i, 0) for i in range(len(sequences))]  # (sequence, node) where each branch ends
        frontier = self._heads.begin(
            hidden, torch.tensor([ids[0] for ids in tokens], device=hidden.device), num_levels
        )
        for level in range(num_levels):
            logits = self._heads.logits(frontier).float()
            best = logits.topk(width)
            chances = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
            best_of = dict(zip(rows, best.indices.tolist(), strict=True))
            chance_of = dict(zip(rows, chances.tolist(), strict=True))
            grown = [
                (i, node)
                for i, shape in enumerate(shapes)
                if level < shape.num_levels
                for node in shape.levels[level]
            ]
            for i, node in grown:
                parent, rank = shapes[i].parents[node], shapes[i].ranks[node]
                tokens[i].append(best_of[i, parent][rank])
                survivals[i].append(survivals[i][parent] * chance_of[i, parent][rank])
            row_of = {row: index for index, row in enumerate(rows)}
            rows = [(i, node) for i, node in grown if node in shapes[i].inner]
            if rows:
                parents = [row_of[i, shapes[i].parents[node]] for i, node in rows]
                new_ids = [tokens[i][node] for i, node in rows]
                frontier = self._heads.extend(
                    frontier,
                    torch.tensor(parents, device=hidden.device),
                    torch.tensor(new_ids, device=hidden.device),
                )
        return [
            DraftTree(tuple(ids), shape.parents, tuple(chances))
            for ids, shape, chances in zip(tokens, shapes, survivals, strict=True)
        ]
