"""HydraHeads: plain Hydra draft heads, sequentially dependent (Ankner et al. 2024, "Hydra").

Knows hidden states and token ids, nothing of sequences, trees of a request, files or training data.

Letters: N rows (branches), H hidden size, D tokens that may be drafted, K heads.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headway.draft_heads.config import HydraConfig
from headway.draft_heads.draft_vocabulary import check_draft_ids, narrowed, places_of
from headway.engine.runner import bend, logit_softcap


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """The two ends of the target model that heads borrow: frozen, never saved, never moved.

    They are called; what they are, plain modules or packed ones, matters to native.py alone.
    """

    embed: nn.Module
    """Token ids [...] to input embeddings [..., H]."""
    head: nn.Module
    """Last hidden states [..., H] to logits [..., V] before `softcap`."""
    softcap: float | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: Any) -> "TargetEnds":
        """Take the ends of a transformers model (Any: its class is known at run time alone)."""
        return cls(
            model.get_input_embeddings(),
            model.get_output_embeddings(),
            logit_softcap(model),
            model.dtype,
            model.device,
        )

    def project(self, hidden: Tensor) -> Tensor:
        """Turn last hidden states [..., H] into logits [..., V] float32."""
        return bend(self.head(hidden).float(), self.softcap)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The branches that head number `level` is about to extend.

    `sums` [N, levels left, 2, H] are the running sums of each branch for this head and the ones
    after it: [:, 0, 0] is R u and [:, 0, 1] is A u of the formula in HydraHeads, u complete.
    """

    level: int
    sums: Tensor


class HydraHeads(nn.Module):
    """K heads; head i guesses the token i + 2 places after the hidden state it starts from.

        u_i = [h_t ; E(x_t+1) ; ... ; E(x_t+1+i)]           (i + 2) H numbers
        z_i = R_i u_i + r_i + SiLU(A_i u_i + a_i)           one block a head
        logits_i = output_head(z_i)                         for x_t+2+i

    h_t is the target's last hidden state after its final norm, E its input embedding, x_t+1 a token
    that the target has already chosen.

    Running sums. A matrix times a concatenation is a sum, R_i u_i = R_i[0] h + R_i[1] E(x_t+1) ...,
    so the matrices are stored by input place, not by head: `inputs[p]` holds the H x H blocks of
    all heads that read place p, R and A side by side. A branch carries the sums of the heads still
    to come, and one more token costs it one H x H block per matrix left, (levels left) x 2 H^2.
    What an ancestor paid for is never paid again by its children: in a tree the hidden state is
    multiplied once, not once a node, and no concatenation is built. (To sum up only when a head's
    turn comes would re-read the ancestors of every node; on a chain both ways cost the same.)

    Example, K = 3: inputs[0] and inputs[1] feed heads 0 1 2, inputs[2] heads 1 2, inputs[3] head 2.

    Vocabulary projection. As published every head owns one, which would make the heads of a small
    model as large as the model (95 % of SmolLM2-135M). Here all heads share the target's frozen one
    unless `own_output_heads`, and each z starts as h_t itself (R_i = [1 0 .. 0], the rest 0), where
    the target's projection makes sense; the published code draws R_i at random.

    With `draft_ids` the heads score those tokens alone, with the target's rows for them.
    """

    draft_ids: Tensor | None

    def __init__(
        self, config: HydraConfig, ends: TargetEnds, draft_ids: Tensor | None = None
    ) -> None:
        """draft_ids: see draft_vocabulary.py. Raises ValueError for a bad one."""
        super().__init__()
        self.config = config
        if draft_ids is not None:
            check_draft_ids(draft_ids, config.vocab_size, config.tree.width)
            draft_ids = draft_ids.to(ends.device)
            ends = replace(ends, head=narrowed(ends.head, draft_ids))
        self.ends = ends
        """The target's ends, its output head with the tokens alone that may be drafted."""
        self.register_buffer("draft_ids", draft_ids)
        size, num_heads = config.hidden_size, config.num_heads
        num_readers = [num_heads - max(0, place - 1) for place in range(num_heads + 1)]
        self.inputs = nn.ModuleList(
            nn.Linear(size, readers * 2 * size, bias=place == 0)
            for place, readers in enumerate(num_readers)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(size, self.num_outputs)
            for _ in range(num_heads if config.own_output_heads else 0)
        )
        self._reset()

    @property
    def num_outputs(self) -> int:
        """D, the logits that a head makes."""
        return self.config.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def token_ids(self, places: Tensor) -> Tensor:
        """Turn numbers of outputs into token ids."""
        return places if self.draft_ids is None else self.draft_ids[places]

    def places(self, labels: Tensor) -> Tensor:
        """Turn labels into numbers of outputs, IGNORED where a head has none for a token."""
        return places_of(labels, self.draft_ids)

    @torch.no_grad()
    def _reset(self) -> None:
        for parameter in self.inputs.parameters():
            parameter.zero_()
        size = self.config.hidden_size
        blocks = self.inputs[0].get_parameter("weight").view(-1, 2, size, size)
        blocks[:, 0] = torch.eye(size, device=blocks.device)

    @torch.no_grad()
    def copy_output_head(self) -> None:
        """Start the heads' own vocabulary projections, if any, as copies of the target's."""
        ends = self.ends
        units = torch.eye(self.config.hidden_size, dtype=ends.dtype, device=ends.device)
        bias = ends.project(torch.zeros_like(units[0]))
        weight = (ends.project(units) - bias).T
        for output in self.outputs:
            output.get_parameter("weight").copy_(weight)
            output.get_parameter("bias").copy_(bias)

    def begin(self, hidden: Tensor, root_ids: Tensor, num_levels: int) -> Frontier:
        """Start branches of up to `num_levels` drafts, one for each row.

        hidden: [N, H] h_t; root_ids: [N] int64, x_t+1.
        """
        sums = self._feed(0, hidden, num_levels) + self._feed(1, self.embed(root_ids), num_levels)
        return Frontier(0, sums)

    def extend(self, frontier: Frontier, rows: Tensor | slice, token_ids: Tensor) -> Frontier:
        """Append one drafted token to the branches `rows` of a frontier; a row may be taken twice.

        rows: [M] int64 or a slice; token_ids: [M] int64. The last head's frontier has no next one.
        """
        sums = frontier.sums[rows, 1:]
        return Frontier(
            frontier.level + 1,
            sums + self._feed(frontier.level + 2, self.embed(token_ids), sums.shape[1]),
        )

    def features(self, frontier: Frontier) -> Tensor:
        """Compute z [N, H] of the head whose turn it is."""
        residual, gate = frontier.sums[:, 0].unbind(1)
        return residual + F.silu(gate)

    def project(self, level: int, features: Tensor) -> Tensor:
        """Turn z [N, H] of head `level` into logits [N, D]."""
        if self.outputs:
            logits: Tensor = self.outputs[level](features)
            return logits
        return self.ends.project(features.to(self.ends.dtype))

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Turn the target's own hidden states [N, H] into its logits [N, D]."""
        return self.ends.project(hidden)

    def logits(self, frontier: Frontier) -> Tensor:
        """Score the next token of each branch: [N, D]."""
        return self.project(frontier.level, self.features(frontier))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look token ids [...] up in the target's input embedding: [..., H]."""
        embeddings: Tensor = self.ends.embed(token_ids)
        return embeddings

    def _feed(self, place: int, values: Tensor, num_levels: int) -> Tensor:
        """Multiply one input place for its first `num_levels` readers: [N, levels, 2, H]."""
        size = self.config.hidden_size
        end = num_levels * 2 * size
        linear = self.inputs[place]
        weight = linear.get_parameter("weight")
        bias = linear.get_parameter("bias")[:end] if place == 0 else None
        products = F.linear(values.to(weight.dtype), weight[:end], bias)
        return products.view(-1, num_levels, 2, size)
