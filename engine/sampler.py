"""accept: which drafted tokens of each tree stand, and the token after them. All randomness is here.

Plain decoding is accepting a tree of one node. Knows logits and tokens, not models or caches.
R rows (the nodes of all trees), V vocabulary, n tokens.
"""

import math
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from headway.engine.batch import ForwardOutput
from headway.engine.logits import Context, is_plain, process, takes_likeliest
from headway.engine.noise import gumbel, gumbel_at
from headway.engine.request import TokenLogprobs
from headway.engine.sequence import Sequence
from headway.engine.tree import DraftTree

_NOISE_TOKENS = 1 << 17
"""Noise drawn at once on a CPU: its intermediate tensors then stay in the cache."""

_UNUSABLE = (
    "the model's logits are not finite at {}; the fault is in the model or its weights, not in the "
    "request"
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one verified tree adds to its sequence.

    Example, the tree in DraftTree's docstring: the model draws "cat" at the root, "ran" at node 1
    and "home" at node 4. Then path is (0, 1, 4) and token_ids are cat, ran, home.
    """

    path: tuple[int, ...]
    """Nodes whose keys and values stay, the root first."""
    token_ids: tuple[int, ...]
    """The drafts that were accepted, then the bonus token: one for each node of the path."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, if the request asked for them."""
    error: str = ""
    """Set when the last node of the path has no usable logits: it gave no token, the request ends."""


def accept(
    sequences: Seq[Sequence],
    trees: Seq[DraftTree],
    output: ForwardOutput,
    eos_token_ids: Collection[int] = (),
) -> list[Accepted]:
    """Walk each tree from its root to the child that holds the token drawn there, while there is one.

    output: R rows, one for each node, tree after tree. The token after a node is
    argmax_v [log p(v) + G(seed, position, v)], p the law of engine/logits.py and G the noise of
    engine/noise.py: what plain sampling draws, so drafts change the number of steps and nothing
    else. At temperature 0 there is no noise. Equals go to the lowest id. eos_token_ids cannot be
    drawn before min_new_tokens; text after an end is the caller's to cut.
    """
    likeliest = _usable(output.best_ids, output.best_values)
    walks = list(_walks(sequences, trees, len(likeliest)))
    moving = []
    for walk in walks:
        if not walk.takes_likeliest:
            moving.append(walk)
            continue
        while walk.advance(likeliest[walk.row]):
            pass
    while moving:
        drawn = _draw(_stored(output), moving, eos_token_ids)
        moving = [walk for walk, token in zip(moving, drawn, strict=True) if walk.advance(token)]
    return [walk.accepted(output) for walk in walks]


def prompt_logprobs(
    logits: torch.Tensor, next_ids: Seq[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Score the token after each position of a prompt: logits [n, V] float, n ids -> n logprobs.

    FloatingPointError if a row is unusable: the caller ends that request with an error.
    """
    if not logits.amax(-1).isfinite().all():
        raise FloatingPointError(_UNUSABLE.format("some position of the prompt"))
    return tuple(_token_logprobs(logits, next_ids, num_top))


class _Walk:
    """The way down one tree so far."""

    def __init__(self, sequence: Sequence, tree: DraftTree, first_row: int) -> None:
        self._sequence = sequence
        self._tree = tree
        self._first_row = first_row
        self._path = [0]
        self._token_ids: list[int] = []
        self._error = ""

    @property
    def context(self) -> Context:
        """What comes before the next token: the drafts drawn so far."""
        return Context(self._sequence, tuple(self._token_ids))

    @property
    def takes_likeliest(self) -> bool:
        """Whether every token on the way is the likeliest of its row as it is."""
        return takes_likeliest(self._sequence)

    @property
    def row(self) -> int:
        return self._first_row + self._path[-1]

    def advance(self, token_id: int | None) -> bool:
        """Emit what was drawn at the current node and go to its child; False when there is none."""
        if token_id is None:
            self._error = _UNUSABLE.format(f"position {self.context.position}")
            return False
        child = self._tree.child(self._path[-1], token_id)
        self._token_ids.append(token_id)
        if child is not None:
            self._path.append(child)
        return child is not None

    def accepted(self, output: ForwardOutput) -> Accepted:
        token_ids = tuple(self._token_ids)
        num_top = self._sequence.request.num_logprobs
        logprobs: list[TokenLogprobs] = []
        if num_top is not None and token_ids:
            rows = [self._first_row + node for node in self._path[: len(token_ids)]]
            logprobs = _token_logprobs(_stored(output)[rows], token_ids, num_top)
        return Accepted(tuple(self._path), token_ids, tuple(logprobs), self._error)


def _walks(sequences: Seq[Sequence], trees: Seq[DraftTree], num_rows: int) -> Iterator[_Walk]:
    first_row = 0
    for sequence, tree in zip(sequences, trees, strict=True):
        yield _Walk(sequence, tree, first_row)
        first_row += len(tree.token_ids)
    assert first_row == num_rows, f"{first_row} nodes, but logits of {num_rows}"


def _stored(output: ForwardOutput) -> torch.Tensor:
    """The logits [R, V] of a step that needs them; batch.needs_logits says which do."""
    assert output.logits is not None, "the step needs logits that were not computed"
    return output.logits


def _usable(ids: torch.Tensor, values: torch.Tensor) -> list[int | None]:
    """[R] ids and their logits -> the ids, None where the logit is not a finite number."""
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [i if math.isfinite(value) else None for i, value in pairs]


def _draw(
    logits: torch.Tensor, walks: Seq[_Walk], eos_token_ids: Collection[int]
) -> list[int | None]:
    """Draw at the current node of each walk: logits [R, V] -> ids, None where a row is unusable.

    A row may hold -inf, but its largest value must be a finite number.
    """
    contexts = [walk.context for walk in walks]
    plain = [i for i, context in enumerate(contexts) if is_plain(context)]
    plain_rows = logits[[walks[i].row for i in plain]]
    drawn = dict(zip(plain, _draw_plain(plain_rows, [contexts[i] for i in plain]), strict=True))
    return [
        drawn[i] if i in drawn else _draw_shaped(logits[walk.row], contexts[i], eos_token_ids)
        for i, walk in enumerate(walks)
    ]


def _draw_plain(logits: torch.Tensor, contexts: Seq[Context]) -> list[int | None]:
    """Draw rows that nothing but temperature shapes, together: [R, V] -> R ids."""
    if not contexts:
        return []
    temperatures = [context.params.temperature or 1.0 for context in contexts]
    scores = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    noisy = [i for i, context in enumerate(contexts) if context.params.temperature > 0]
    num_rows = max(1, _NOISE_TOKENS // logits.shape[-1]) if logits.is_cpu else len(contexts)
    for start in range(0, len(noisy), num_rows):
        rows = noisy[start : start + num_rows]
        seeds = [contexts[i].params.seed for i in rows]
        positions = [contexts[i].position for i in rows]
        noise = gumbel(seeds, positions, logits.shape[-1], logits.device)
        for row, row_noise in zip(rows, noise, strict=True):
            scores[row].add_(row_noise)
    best = scores.max(-1)  # the first of equals
    return _usable(best.indices, best.values)


def _draw_shaped(
    logits: torch.Tensor, context: Context, eos_token_ids: Collection[int]
) -> int | None:
    """Draw from a law with masks, penalties or filters: [V] -> its token."""
    if not logits.amax().isfinite():
        return None
    law = process(logits, context, eos_token_ids)
    scores, params = law.log_weights, context.params
    if law.token_ids is None:
        noise = gumbel([params.seed], [context.position], len(scores), scores.device)[0]
        return int((scores + noise).max(-1).indices)
    noise = gumbel_at(params.seed, context.position, law.token_ids)
    return int(law.token_ids[(scores + noise).max(-1).indices])


def _token_logprobs(logits: torch.Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """[n, V] float and n ids -> their logprobs. Ranks compare logits, which rounding merges less."""
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    ranks = 1 + (logits > logits.gather(1, ids)).sum(-1)
    return [
        TokenLogprobs(token_id, logprob, rank, _top(logits[i], logprobs[i], num_top))
        for i, (token_id, logprob, rank) in enumerate(
            zip(token_ids, logprobs.gather(1, ids)[:, 0].tolist(), ranks.tolist(), strict=True)
        )
    ]


def _top(
    logits: torch.Tensor, logprobs: torch.Tensor, num_top: int
) -> tuple[tuple[int, float], ...]:
    """The best of a row, [V] and [V], the lowest id first among equals (as drawn at temperature 0)."""
    if not num_top:
        return ()
    best = logits.topk(min(num_top, len(logits))).values
    ids = (logits >= best[-1]).nonzero().squeeze(1)
    order = logits[ids].sort(descending=True, stable=True).indices[:num_top]
    return tuple(zip(ids[order].tolist(), logprobs[ids[order]].tolist(), strict=True))
