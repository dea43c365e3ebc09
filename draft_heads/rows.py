"""HeadRows: what heads learn from, computed with the frozen target; and the heads' loss on them.

Serving and training run the heads through the same begin / extend / project.

Letters: N rows, K heads, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.draft_heads.config import Loss
from headway.draft_heads.data import IGNORED, Example, align
from headway.draft_heads.hydra import Frontier, HydraHeads

CHUNK_BYTES = 64 << 20
"""Logits held at once in float32; a whole step's would take gigabytes."""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Aligned rows of a batch (data.align says what stands where).

    hidden: [N, H] h_t; given: [N, K] int64; labels: [N, K] int64; teacher: [N, K, H], the hidden
    states h_t+1 .. h_t+K from which the target itself predicts the labels.
    """

    hidden: Tensor
    given: Tensor
    labels: Tensor
    teacher: Tensor


@torch.no_grad()
def compute_rows(model: Any, examples: list[Example], num_heads: int) -> HeadRows:
    """Run the frozen target over a batch and gather the rows to learn from.

    The states are those after the model's final norm, the kind that serving hands to `observe`.
    """
    longest = max(len(example.ids) for example in examples)
    # Padding stands on the right, where no real token can attend to it.
    ids = torch.tensor([[*e.ids, *[0] * (longest - len(e.ids))] for e in examples])
    real = torch.tensor([[i < len(e.ids) for i in range(longest)] for e in examples])
    states = model.base_model(
        input_ids=ids.to(model.device), attention_mask=real.to(model.device), use_cache=False
    ).last_hidden_state
    aligned = [align(example, num_heads) for example in examples]
    owner = torch.repeat_interleave(torch.tensor([len(positions) for positions, _, _ in aligned]))
    positions = torch.cat([positions for positions, _, _ in aligned])
    ahead = positions[:, None] + torch.arange(1, num_heads + 1)
    return HeadRows(
        states[owner, positions],
        torch.cat([given for _, given, _ in aligned]).to(states.device),
        torch.cat([labels for _, _, labels in aligned]).to(states.device),
        states[owner[:, None], ahead.clamp(max=longest - 1)],
    )


def num_left_out(heads: HydraHeads, rows: HeadRows) -> int:
    """Count the labels that heads cannot draft."""
    lost = (heads.places(rows.labels) == IGNORED) & (rows.labels != IGNORED)
    return int(lost.sum())


def frontiers(heads: HydraHeads, rows: HeadRows) -> Iterator[Frontier]:
    """Run the heads along the text: the frontier of each level, given the text's own tokens."""
    num_heads = heads.config.num_heads
    frontier = heads.begin(rows.hidden, rows.given[:, 0], num_heads)
    yield frontier
    for level in range(1, num_heads):
        frontier = heads.extend(frontier, slice(None), rows.given[:, level])
        yield frontier


def backward(heads: HydraHeads, rows: HeadRows, loss: Loss) -> list[float]:
    """Add the gradient of the sum of the heads' mean losses; return those losses, one a head.

    Cross-entropy against the text's tokens ("hard") or the target's distribution at T = 1 ("soft").
    A label that heads cannot draft is left out, and the target's distribution is that over what they
    can. Logits are worked off in chunks of rows, each of which hands its gradient back at once.
    """
    losses, features, gradients = [], [], []
    for frontier in frontiers(heads, rows):
        level = frontier.level
        z = heads.features(frontier)
        leaf = z.detach().requires_grad_()
        places = heads.places(rows.labels[:, level])
        known = (places != IGNORED).nonzero()[:, 0]
        total = 0.0
        for chunk in _chunks(known, heads):
            logits = heads.project(level, leaf[chunk]).float()
            if loss == "hard":
                target = places[chunk]
            else:
                target = heads.target_logits(rows.teacher[chunk, level]).float().softmax(-1)
            part = F.cross_entropy(logits, target, reduction="sum") / len(known)
            part.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            total += part.item()
        losses.append(total)
        if leaf.grad is not None:
            features.append(z)
            gradients.append(leaf.grad)
    torch.autograd.backward(features, gradients)
    return losses


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often chains of drafts are right on held-out text.

    accuracy: for each head, how often its best guess is the next token, given the text before it.
    tau: tokens emitted per pass of the model if this text were generated with a chain of K drafts:
    1 + sum over depth of the product of the accuracies up to it, each taken where all shallower
    drafts were right. The bonus token is included; plain decoding is 1.00.
    """

    accuracy: tuple[float, ...]
    tau: float


@torch.no_grad()
def measure_acceptance(heads: HydraHeads, model: Any, batches: list[list[Example]]) -> Acceptance:
    """Run the heads over held-out batches and count what a chain would have had accepted."""
    counts = torch.zeros(4, heads.config.num_heads, dtype=torch.float64)
    for batch in batches:
        rows = compute_rows(model, batch, heads.config.num_heads)
        before = torch.ones(len(rows.hidden), dtype=torch.bool, device=rows.hidden.device)
        for frontier in frontiers(heads, rows):
            label = rows.labels[:, frontier.level]
            parts = _chunks(heads.features(frontier), heads)
            best = [heads.project(frontier.level, part).argmax(-1) for part in parts]
            known, right = label != IGNORED, heads.token_ids(torch.cat(best)) == label
            masks = (known, right, known & before, right & before)
            counts[:, frontier.level] += torch.tensor([float(mask.sum()) for mask in masks])
            before &= right
    known, right, reached, accepted = counts
    conditional = accepted / reached.clamp(min=1)
    return Acceptance(
        tuple((right / known.clamp(min=1)).tolist()), 1 + float(conditional.cumprod(0).sum())
    )


def _chunks(values: Tensor, heads: HydraHeads) -> tuple[Tensor, ...]:
    """Split rows so that the float32 logits of a chunk stay below CHUNK_BYTES."""
    if not len(values):  # torch.split would return one empty chunk, whose mean loss is NaN.
        return ()
    return torch.split(values, max(1, CHUNK_BYTES // (4 * heads.num_outputs)))
