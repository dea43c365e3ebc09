"""Batch, what the scheduler chose for a step; ForwardInput, made from it; ForwardOutput, what comes back."""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

import torch

from headway.engine.kv_cache import KVCache
from headway.engine.logits import takes_likeliest
from headway.engine.sequence import Sequence
from headway.engine.tree import DraftTree

_MAX_VIEWS = 4096


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


@dataclass(frozen=True)
class Batch:
    """What one step computes: the sequences that sample come first."""

    sampling: tuple[Scheduled, ...]
    filling: tuple[Scheduled, ...]
    """Prompt chunks that do not reach the end of their sequence."""

    def __len__(self) -> int:
        return len(self.sampling) + len(self.filling)

    @cached_property
    def parts(self) -> tuple[Scheduled, ...]:
        """All parts, in the order of their rows."""
        return self.sampling + self.filling

    @cached_property
    def num_span_tokens(self) -> int:
        """Rows without drafts."""
        return sum(part.span for part in self.parts)

    @cached_property
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


class Staging:
    """Memory for the numbers of a step's input, kept from step to step.

    Making a tensor, or a view of one, takes longer than filling it, so both are kept: a view for each
    shape that a column had. What was staged stays until the next step is staged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, array[int]] = {}
        self._views: dict[tuple[str, int, int], torch.Tensor] = {}

    def column(self, name: str, values: "array[int]") -> torch.Tensor:
        """Copy values into the memory of a column: [len(values)] int32 or int64, as their array."""
        return self.table(name, values, 0)

    def table(self, name: str, values: "array[int]", width: int) -> torch.Tensor:
        """As `column`, but in rows of `width`; 0 makes one row that is no dimension."""
        num_values = len(values)
        memory = self._memory.get(name)
        if memory is None or len(memory) < num_values or len(self._views) > _MAX_VIEWS:
            memory = array(values.typecode, bytes(values.itemsize * max(64, 2 * num_values)))
            self._memory[name] = memory
            self._views = {key: view for key, view in self._views.items() if key[0] != name}
        memory[:num_values] = values
        view = self._views.get((name, num_values, width))
        if view is None:
            dtype = torch.int64 if memory.itemsize == 8 else torch.int32
            view = torch.frombuffer(memory, dtype=dtype)[:num_values]
            view = view.view(-1, width) if width else view
            self._views[name, num_values, width] = view
        return view if self._device.type == "cpu" else view.to(self._device)


def build_input(
    batch: Batch, trees: Seq[DraftTree], cache: KVCache, staging: Staging | None = None
) -> ForwardInput:
    """Lay out a batch and its trees (one for each sampling sequence) as one flat row."""
    token_ids, positions, slots = array("q"), array("q"), array("q")
    masks, logit_rows = array("q"), array("q")
    cu_lengths, contexts, spans = array("i", [0]), array("i"), array("i")
    tables = array("i")
    width = max(len(part.sequence.block_table) for part in batch.parts)
    for part, tree in zip_longest(batch.parts, trees):
        sequence, start = part.sequence, part.sequence.num_computed
        end = start + part.span
        token_ids.extend(sequence.tokens[start:end])
        positions.extend(range(start, end))
        masks.extend([0] * part.span)
        num_rows = part.span
        if tree is not None:
            first_row = len(token_ids) - 1
            token_ids.extend(tree.token_ids[1:])
            positions.extend([end - 1 + depth for depth in tree.depths[1:]])
            masks[-1:] = array("q", [_signed(mask) for mask in tree.ancestor_masks])
            logit_rows.extend(range(first_row, len(token_ids)))
            num_rows += tree.num_drafted
        slots.extend(slot_range(sequence, start, start + num_rows, cache.block_size))
        cu_lengths.append(len(token_ids))
        contexts.append(start)
        spans.append(part.span)
        tables.extend(sequence.block_table)
        tables.extend([0] * (width - len(sequence.block_table)))
    staging = staging or Staging(cache.data.device)
    return ForwardInput(
        token_ids=staging.column("token_ids", token_ids),
        positions=staging.column("positions", positions),
        slots=staging.column("slots", slots),
        tree_masks=staging.column("tree_masks", masks),
        cu_lengths=staging.column("cu_lengths", cu_lengths),
        context_lengths=staging.column("context_lengths", contexts),
        span_lengths=staging.column("span_lengths", spans),
        block_tables=staging.table("block_tables", tables, width),
        logit_rows=staging.column("logit_rows", logit_rows),
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


def _signed(mask: int) -> int:
    """The 64-bit word of `mask` as int64: bit 63 is the sign."""
    return mask - (1 << 64) if mask >> 63 else mask
