"""Batch, what the scheduler chose for a step; ForwardInput, made from it; ForwardOutput, what comes back."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch

from headway.engine.kv_cache import KVCache
from headway.engine.logits import takes_likeliest
from headway.engine.sequence import Sequence
from headway.engine.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's part of a step."""

    sequence: Sequence
    span: int
    """How many pending tokens are computed."""
    max_drafted: int
    """Nodes that may be drafted; blocks for them are reserved."""

    @property
    def num_tokens(self) -> int:
        """Rows that this part takes at most."""
        return self.span + self.max_drafted

    @property
    def samples(self) -> bool:
        """Whether the span ends with the last token, so that this step draws the next ones."""
        return self.span == self.sequence.num_pending


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes: the sequences that sample come first."""

    sampling: tuple[Scheduled, ...]
    filling: tuple[Scheduled, ...]
    """Prompt chunks that do not reach the end of their sequence."""

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def parts(self) -> tuple[Scheduled, ...]:
        """All parts, in the order of their rows."""
        return self.sampling + self.filling

    @property
    def num_span_tokens(self) -> int:
        """Rows without drafts."""
        return sum(part.span for part in self.parts)

    @property
    def sequences(self) -> list[Sequence]:
        """The sampling sequences."""
        return [part.sequence for part in self.sampling]


class ForwardInput(NamedTuple):
    """Everything the model's pass needs. T rows, S sequences, P blocks, R rows with logits.

    Rows of a sequence stand together: its span, then the drafted nodes of its tree. See
    kernels/attention.py for what each tensor means, with an example.
    """

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64; a node's is that of its root plus its depth."""
    slots: torch.Tensor
    """[T] int64: where the keys and values go."""
    tree_masks: torch.Tensor
    """[T] int64."""
    cu_lengths: torch.Tensor
    """[S + 1] int32."""
    context_lengths: torch.Tensor
    """[S] int32."""
    span_lengths: torch.Tensor
    """[S] int32."""
    block_tables: torch.Tensor
    """[S, P] int32, padded with 0."""
    logit_rows: torch.Tensor
    """[R] int64: every node of every tree, in order."""
    needs_logits: bool
    """Whether some sequence of the step needs more than the likeliest token of its rows."""
    cache: KVCache


class ForwardOutput(NamedTuple):
    """What the model's pass gives. T rows, R rows that sample (ForwardInput.logit_rows)."""

    best_ids: torch.Tensor
    """[R] int64: the likeliest token, the lowest id among equals."""
    best_values: torch.Tensor
    """[R] float32: its logit; NaN or infinite where the row is unusable."""
    logits: torch.Tensor | None
    """[R, vocabulary] float32; may be None where the input does not need them."""
    hidden: torch.Tensor
    """[T, hidden size]: last hidden states, after the model's final norm."""

    @classmethod
    def of(cls, logits: torch.Tensor, hidden: torch.Tensor) -> "ForwardOutput":
        """Find the likeliest token of each row of logits [R, vocabulary]."""
        best = logits.max(-1)  # the first of equals; three times faster than argmax on a CPU
        return cls(best.indices, best.values, logits, hidden)


def build_input(batch: Batch, trees: Seq[DraftTree], cache: KVCache) -> ForwardInput:
    """Lay out a batch and its trees (one for each sampling sequence) as one flat row."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    masks: list[int] = []
    cu_lengths = [0]
    logit_rows: list[int] = []
    for part, tree in zip_longest(batch.parts, trees):
        sequence, start = part.sequence, part.sequence.num_computed
        end = start + part.span
        token_ids += sequence.tokens[start:end]
        positions += range(start, end)
        masks += [0] * part.span
        num_rows = part.span
        if tree is not None:
            first_row = len(token_ids) - 1
            token_ids += tree.token_ids[1:]
            positions += [end - 1 + depth for depth in tree.depths[1:]]
            masks[-1:] = [_signed(mask) for mask in tree.ancestor_masks]
            logit_rows += range(first_row, len(token_ids))
            num_rows += tree.num_drafted
        slots += slot_range(sequence, start, start + num_rows, cache.block_size)
        cu_lengths.append(len(token_ids))
    sequences = [part.sequence for part in batch.parts]

    def tensor(values: Seq[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=cache.data.device)

    return ForwardInput(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        tree_masks=tensor(masks),
        cu_lengths=tensor(cu_lengths, torch.int32),
        context_lengths=tensor([each.num_computed for each in sequences], torch.int32),
        span_lengths=tensor([part.span for part in batch.parts], torch.int32),
        block_tables=_block_tables(sequences, cache.data.device),
        logit_rows=tensor(logit_rows),
        needs_logits=any(needs_logits(sequence) for sequence in batch.sequences),
        cache=cache,
    )


def needs_logits(sequence: Sequence) -> bool:
    """Whether the next tokens of a sequence take more than the likeliest token of each row."""
    return sequence.request.num_logprobs is not None or not takes_likeliest(sequence)


def slot_range(sequence: Sequence, start: int, end: int, block_size: int) -> list[int]:
    """Slots of tokens start..end-1 of a sequence, from its block table."""
    table = sequence.block_table
    return [
        table[index // block_size] * block_size + index % block_size for index in range(start, end)
    ]


def _block_tables(sequences: Seq[Sequence], device: torch.device) -> torch.Tensor:
    width = max(len(sequence.block_table) for sequence in sequences)
    return torch.tensor(
        [
            sequence.block_table + [0] * (width - len(sequence.block_table))
            for sequence in sequences
        ],
        dtype=torch.int32,
        device=device,
    )


def _signed(mask: int) -> int:
    """The 64-bit word of `mask` as int64: bit 63 is the sign."""
    return mask - (1 << 64) if mask >> 63 else mask
