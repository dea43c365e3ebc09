"""Scheduler: which sequences run in a step, with how many tokens, and what becomes of them.

Knows nothing of tensors: it works on Sequence and BlockPool and can be tested without a model.
"""

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

from headway.engine.batch import Batch, Scheduled
from headway.engine.block_pool import BlockPool
from headway.engine.config import EngineConfig
from headway.engine.sequence import Sequence
from headway.engine.stats import EngineCounters, Undrafted


class Scheduler:
    """Continuous batching over one budget of tokens a step.

    First every sequence that decodes gets its root and its drafts, then prompts get what is left, in
    chunks: so a long prompt costs the streams beside it at most one chunk a step, and several prompts
    share a step. Turns go by (priority, arrival).
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, counters: EngineCounters) -> None:
        self.config = config
        self.pool = pool
        self.counters = counters
        self.running: list[Sequence] = []
        """In turn order."""
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._order = itertools.count()
        self._arrival: dict[str, int] = {}

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for _, _, sequence in self._waiting]

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._arrival[sequence.request.request_id] = next(self._order)
        heapq.heappush(self._waiting, (*self._turn(sequence), sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, wherever it is, and take its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            heapq.heapify(self._waiting)
        self.pool.release(sequence)
        del self._arrival[sequence.request.request_id]

    def schedule(self) -> Batch:
        """Choose the work of one step and reserve its cache blocks."""
        decoding = [sequence for sequence in self.running if sequence.num_pending == 1]
        parts = self._decode(decoding)
        budget = self.config.max_batch_tokens - sum(part.num_tokens for part in parts)
        for sequence in self._prompts():
            part = self._fill(sequence, budget)
            if part is None:
                break
            parts.append(part)
            budget -= part.num_tokens
        return Batch(
            sampling=tuple(part for part in parts if part.samples),
            filling=tuple(part for part in parts if not part.samples),
        )

    def _decode(self, decoding: list[Sequence]) -> list[Scheduled]:
        """Schedule the last token of each sequence and drafts after it.

        Drafts share what roots and one prompt chunk leave of the budget, in equal parts. When blocks
        run out, drafts go first, then the last sequence in turn loses its blocks.
        """
        left = self.config.max_batch_tokens - len(decoding)
        if self._waiting or len(decoding) < len(self.running):
            left -= self.config.max_chunk_tokens
        share = max(0, left) // max(1, len(decoding))
        parts: list[Scheduled] = []
        num_preempted = self.counters.preemptions
        for sequence in decoding:
            if sequence not in self.running:
                continue  # preempted for one before it
            max_drafted = self._max_drafted(sequence, share)
            while sequence in self.running:
                if self.pool.grow(sequence, len(sequence.tokens) + max_drafted):
                    parts.append(Scheduled(sequence, 1, max_drafted))
                    break
                self._preempt(self.running[-1])
        if self.counters.preemptions == num_preempted:
            return parts
        return [part for part in parts if part.sequence in self.running]

    def _prompts(self) -> Iterator[Sequence]:
        """Sequences with a prompt to compute, in turn; waiting ones are admitted as they come up."""
        yield from [sequence for sequence in self.running if sequence.num_pending > 1]
        while self._waiting and len(self.running) < self.config.max_running_requests:
            sequence = self._waiting[0][2]
            self.pool.share_prefix(sequence)
            if not self._fits(sequence):
                self.pool.release(sequence)
                return
            self.pool.grow(sequence, len(sequence.tokens))
            heapq.heappop(self._waiting)
            self._admit(sequence)
            yield sequence

    def _fits(self, sequence: Sequence) -> bool:
        """Whether all its tokens find blocks, with one to spare for each running sequence to grow."""
        missing = self.pool.num_blocks_for(len(sequence.tokens)) - len(sequence.block_table)
        return missing + len(self.running) <= self.pool.num_available

    def _fill(self, sequence: Sequence, budget: int) -> Scheduled | None:
        """Schedule the next chunk of a prompt, with drafts if it reaches the end."""
        span = min(sequence.num_pending, self.config.max_chunk_tokens, budget)
        if span < 1:
            return None
        reaches_end = span == sequence.num_pending
        max_drafted = self._max_drafted(sequence, budget - span) if reaches_end else 0
        return Scheduled(sequence, span, max_drafted)

    def _max_drafted(self, sequence: Sequence, room: int) -> int:
        """Nodes that may be drafted, `room` at most, with blocks reserved for them.

        The bonus token needs no node, so one less than may be emitted is worth drafting. Where that
        leaves some and yet none may be, the reason is counted.
        """
        speculation, stopping = sequence.request.speculation, sequence.request.stopping
        left = stopping.max_new_tokens - sequence.num_generated - 1
        useful = min(left, self.config.max_draft_tokens)
        if useful <= 0:
            return 0
        asked = useful if speculation.max_draft_tokens is None else speculation.max_draft_tokens
        num_nodes = min(useful, asked, room)
        reason: Undrafted
        if not speculation.enabled or asked == 0:
            reason = "request"
        elif room <= 0:
            reason = "load"
        elif not self.pool.grow(sequence, len(sequence.tokens) + num_nodes):
            reason = "blocks"
        else:
            return num_nodes
        self.counters.spec_disabled[reason] += 1
        return 0

    def _admit(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        self.running.sort(key=self._turn)
        self.counters.prefix_query_tokens += len(sequence.tokens)
        self.counters.prefix_hit_tokens += sequence.num_computed
        if not sequence.timing.scheduled:
            sequence.timing = replace(sequence.timing, scheduled=time.monotonic())
            sequence.num_cached_tokens = sequence.num_computed
        num_known = min(sequence.num_computed, sequence.num_prompt_tokens)
        self.counters.prompt_cached_tokens += max(0, num_known - sequence.num_preempted_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a running sequence; it will be computed again from its tokens."""
        self.counters.preemptions += 1
        sequence.num_preempted_tokens = max(sequence.num_preempted_tokens, sequence.num_computed)
        self.running.remove(sequence)
        self.pool.release(sequence)
        heapq.heappush(self._waiting, (*self._turn(sequence), sequence))

    def _turn(self, sequence: Sequence) -> tuple[int, int]:
        request = sequence.request
        return request.priority, self._arrival[request.request_id]
