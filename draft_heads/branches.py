"""Branches: what a drafter asks of heads, level by level; and the plain body, in torch.

native.py is the other one. Knows no sequences and no shapes of trees.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway.draft_heads.hydra import Frontier, HydraHeads


class Guesses(NamedTuple):
    """The likeliest next tokens of each branch, best first."""

    token_ids: list[list[int]]
    chances: list[list[float]]
    """What the heads give each of them."""


class Branches(Protocol):
    """Branches that grow by a token a level; what they hold is good until the next `begin`."""

    def begin(self, hidden: Tensor, root_ids: Seq[int], num_levels: int, num_best: int) -> Guesses:
        """Start a branch for each row, of up to `num_levels` drafts, `num_best` ranked in each level.

        hidden: [N, H], the target's last hidden states; root_ids: the token after each.
        """
        ...

    def extend(self, parents: Seq[int], token_ids: Seq[int]) -> Guesses:
        """Go on with branches `parents` of the last level, each with a token; one may be taken twice."""
        ...


class TorchBranches:
    """Branches by HydraHeads as they are."""

    def __init__(self, heads: HydraHeads) -> None:
        self._heads = heads
        self._frontier: Frontier | None = None
        self._num_best = 0

    @torch.inference_mode()
    def begin(self, hidden: Tensor, root_ids: Seq[int], num_levels: int, num_best: int) -> Guesses:
        """See Branches."""
        self._num_best = num_best
        ids = torch.tensor(root_ids, device=hidden.device)
        return self._guesses(self._heads.begin(hidden, ids, num_levels))

    @torch.inference_mode()
    def extend(self, parents: Seq[int], token_ids: Seq[int]) -> Guesses:
        """See Branches."""
        assert self._frontier is not None
        device = self._frontier.sums.device
        rows = torch.tensor(parents, device=device)
        ids = torch.tensor(token_ids, device=device)
        return self._guesses(self._heads.extend(self._frontier, rows, ids))

    def _guesses(self, frontier: Frontier) -> Guesses:
        self._frontier = frontier
        logits = self._heads.logits(frontier).float()
        best = logits.topk(self._num_best)
        chances = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
        return Guesses(self._heads.token_ids(best.indices).tolist(), chances.tolist())
