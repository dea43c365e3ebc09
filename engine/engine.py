"""Engine: requests in, tokens out, one step at a time. One thread calls it; see loop.py."""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import zip_longest

import torch

from headway.engine.batch import Batch, Scheduled, Staging, build_input, slot_range
from headway.engine.block_pool import BlockPool
from headway.engine.commit import commit_chunk, commit_sample, end
from headway.engine.config import EngineConfig
from headway.engine.draft_budget import DraftBudget
from headway.engine.kv_cache import KVCache
from headway.engine.request import FinishReason, Output, Request, StoppingParams, TokenLogprobs
from headway.engine.runner import ModelRunner
from headway.engine.sampler import Accepted, accept, prompt_logprobs
from headway.engine.scheduler import Scheduler
from headway.engine.sequence import Sequence
from headway.engine.stats import (
    NO_DRAFTER,
    EngineCounters,
    EngineInfo,
    EngineSnapshot,
    StepRecord,
    Stopwatch,
)
from headway.engine.step_times import StepTimes
from headway.engine.tree import Commit, Drafter, DraftTree, num_drafted
from headway.engine.validation import Limits

LOGIT_PIECE = 64
"""Prompt rows whose logits are held at once when prompt logprobs are asked for."""


class Engine:
    """Serves a model: add requests, call step until has_work is False, hand out the outputs."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        eos_token_ids: Seq[int],
        config: EngineConfig,
        limits: Limits,
        drafter: Drafter | None = None,
        budget: DraftBudget | None = None,
        observe_step: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.eos_token_ids = tuple(eos_token_ids)
        self.limits = limits
        self.config = config if drafter else replace(config, max_draft_tokens=0)
        self.drafter = drafter
        self.budget = budget if drafter else None
        """None verifies every draft."""
        num_lengths = self.config.max_draft_tokens + 1
        self.counters = EngineCounters(spec_accepted_lengths=[0] * num_lengths)
        self.pool = BlockPool(cache.num_blocks, cache.block_size, config.prefix_cache)
        self.scheduler = Scheduler(self.config, self.pool, self.counters)
        self._observe_step = observe_step
        self._sequences: dict[str, Sequence] = {}
        self._staging = Staging(cache.data.device)
        self._next_deadline = math.inf
        """No request is overdue before."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request, arrived: float | None = None) -> None:
        """Queue a request that check_request has passed; its id must not be in use."""
        context = min(self.limits.max_context_tokens, self.limits.max_cache_tokens)
        room = context - len(request.prompt_ids)
        stopping = replace(
            request.stopping, max_new_tokens=min(request.stopping.max_new_tokens, room)
        )
        sequence = Sequence(
            replace(request, stopping=stopping), time.monotonic() if arrived is None else arrived
        )
        self._sequences[request.request_id] = sequence
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        self.scheduler.add(sequence)

    def abort(self, request_id: str, reason: FinishReason) -> list[Output]:
        """End a request wherever it is and free its blocks. Unknown ids are no error."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        self._retire(sequence)
        return [end(sequence, reason)]

    def step(self) -> list[Output]:
        """Run one pass of the model over everything that is scheduled."""
        watch = Stopwatch()
        expired = self._expire()
        batch = self.scheduler.schedule()
        watch.lap("schedule")
        if not len(batch):
            return expired
        trees = self._draft(batch)
        watch.lap("draft")
        forward_input = build_input(batch, trees, self.cache, self._staging)
        watch.lap("schedule")
        result = self.runner.forward(forward_input)
        watch.lap("model")
        accepted = accept(batch.sequences, trees, result, self.eos_token_ids)
        self.cache.move(self._moves(batch, accepted))
        watch.lap("accept")
        outputs = self._commit(batch, trees, accepted, result.hidden)
        self._learn(batch, trees, accepted, watch)
        watch.lap("commit")
        self._observe_step(watch.record(len(batch), batch.num_span_tokens + num_drafted(trees)))
        return expired + outputs

    def warm_up(self) -> None:
        """Run the model once, so that the first request finds everything loaded and checked."""
        prompt = tuple(range(4))
        sequence = Sequence(Request("warm-up", prompt, StoppingParams(1)), time.monotonic())
        self.pool.grow(sequence, len(prompt) + 1)
        batch = Batch((Scheduled(sequence, len(prompt), 1),), ())
        trees = [DraftTree.chain(prompt[-1], prompt[:1])]
        self.runner.warm_up(build_input(batch, trees, self.cache))
        if self.budget is not None:
            self._time_passes(sequence, self.budget.times)
        self.pool.release(sequence)

    def snapshot(self) -> EngineSnapshot:
        """The engine's state in plain numbers, good enough for metrics from any thread."""
        waiting = self.scheduler.waiting
        return EngineSnapshot(
            num_running=len(self.scheduler.running),
            num_waiting=len(waiting),
            num_queued_prompt_tokens=sum(sequence.num_prompt_tokens for sequence in waiting),
            num_blocks=self.pool.num_blocks,
            num_active_blocks=self.pool.num_active,
            num_cached_blocks=self.pool.num_cached,
            num_evicted_blocks=self.pool.num_evicted,
            counters=self.counters.copy(),
            info=EngineInfo(
                block_size=self.cache.block_size,
                cache_dtype=str(self.cache.data.dtype).removeprefix("torch."),
                drafter=NO_DRAFTER if self.drafter is None else self.drafter.name,
                max_draft_tokens=self.config.max_draft_tokens,
            ),
            step_seconds=() if self.budget is None else self.budget.times.table(),
        )

    def _time_passes(self, sequence: Sequence, times: StepTimes) -> None:
        """Time passes over the last token of a sequence and drafts under it; the rest is cached.

        The drafts differ, as real ones do: a mixture of experts then reads more than one's weights.
        """
        sequence.num_computed = len(sequence.tokens) - 1

        def run(num_rows: int) -> None:
            drafts = [node % self.limits.vocab_size for node in range(num_rows - 1)]
            tree = DraftTree((sequence.tokens[-1], *drafts), (-1, *(0,) * len(drafts)))
            self.pool.grow(sequence, sequence.num_computed + num_rows)
            batch = Batch((Scheduled(sequence, 1, len(drafts)),), ())
            self.runner.forward(build_input(batch, [tree], self.cache))

        times.measure(run, self.limits.max_cache_tokens - sequence.num_computed)

    def _draft(self, batch: Batch) -> list[DraftTree]:
        """A tree for each sampling sequence; of its root alone where nothing may be drafted."""
        limits = [part.max_drafted for part in batch.sampling]
        if self.budget is not None and not self.budget.allows_drafts:
            self.counters.spec_disabled["cost"] += sum(limit > 0 for limit in limits)
            limits = []
        if self.drafter is None or not any(limits):
            return [DraftTree.root_only(sequence.tokens[-1]) for sequence in batch.sequences]
        trees = self.drafter.propose(batch.sequences, limits)
        for tree, limit in zip(trees, limits, strict=True):
            tree.check(limit)
        if self.budget is None:
            return trees
        return self.budget.prune(batch.sequences, trees, batch.num_span_tokens)

    def _learn(
        self, batch: Batch, trees: Seq[DraftTree], accepted: Seq[Accepted], watch: Stopwatch
    ) -> None:
        """Tell the budget what became of the drafts, and what they cost."""
        if self.budget is None or not batch.sampling:
            return
        if batch.num_span_tokens == len(batch.sampling):  # Rows of prompts have no logits.
            num_rows = batch.num_span_tokens + num_drafted(trees)
            self.budget.times.note(num_rows, watch.model_seconds)
        self.budget.settle(
            batch.sequences,
            trees,
            [result.path for result in accepted],
            batch.num_span_tokens,
            watch.draft_seconds,
            watch.other_seconds,
        )

    def _moves(self, batch: Batch, accepted: Seq[Accepted]) -> list[tuple[int, int]]:
        """Cache slots to copy so that each accepted path lies at consecutive slots after its root."""
        moves: list[tuple[int, int]] = []
        for part, result in zip(batch.sampling, accepted, strict=True):
            pairs = [(node, depth) for depth, node in enumerate(result.path) if node != depth]
            if pairs:
                root = len(part.sequence.tokens) - 1
                end = root + max(result.path) + 1
                slots = slot_range(part.sequence, root, end, self.cache.block_size)
                moves += [(slots[node], slots[depth]) for node, depth in pairs]
        return moves

    def _commit(
        self,
        batch: Batch,
        trees: Seq[DraftTree],
        accepted: Seq[Accepted],
        hidden: torch.Tensor,
    ) -> list[Output]:
        """Make the step's results part of the sequences, and tell the drafter. hidden: [T, H]."""
        outputs: list[Output] = []
        commits: list[Commit] = []
        first_row = 0
        for part, tree, result in zip_longest(batch.parts, trees, accepted):
            outputs.append(self._commit_part(part, tree, result, hidden, first_row))
            commits.append(self._note(part, result, hidden, first_row))
            first_row += part.span + (tree.num_drafted if tree else 0)
        for commit, output in zip(commits, outputs, strict=True):
            self.pool.publish(commit.sequence)
            if output.finish is not None:
                self._retire(commit.sequence)
        if self.drafter is not None:
            live = [commit for commit, out in zip(commits, outputs, strict=True) if not out.finish]
            self.drafter.observe(live)
        return outputs

    def _commit_part(
        self,
        part: Scheduled,
        tree: DraftTree | None,
        result: Accepted | None,
        hidden: torch.Tensor,
        first_row: int,
    ) -> Output:
        """Commit one sequence's part; `tree` and `result` are None for a prompt chunk."""
        scores: tuple[TokenLogprobs, ...] = ()
        if part.sequence.request.num_prompt_logprobs is not None:
            try:
                scores = self._score(part, hidden[first_row : first_row + part.span])
            except FloatingPointError as error:
                return end(part.sequence, FinishReason.ERROR, str(error))
        if tree is None or result is None:
            return commit_chunk(part, scores, self.counters)
        return commit_sample(part, tree, result, scores, self.eos_token_ids, self.counters)

    def _note(
        self, part: Scheduled, result: Accepted | None, hidden: torch.Tensor, first_row: int
    ) -> Commit:
        if self.drafter is None or not self.drafter.needs_hidden:
            return Commit(part.sequence, None)
        root = first_row + part.span - 1
        path = result.path if result else (0,)
        rows = [*range(first_row, root), *(root + node for node in path)]
        return Commit(part.sequence, hidden[rows])

    def _score(self, part: Scheduled, hidden: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """Logprobs of the prompt tokens that follow the span's rows. hidden: [span, H]."""
        sequence, request = part.sequence, part.sequence.request
        assert request.num_prompt_logprobs is not None
        start = max(sequence.num_computed, sequence.num_scored)
        end = min(sequence.num_computed + part.span, sequence.num_prompt_tokens - 1)
        scores: list[TokenLogprobs] = []
        for first in range(start, end, LOGIT_PIECE):
            last = min(first + LOGIT_PIECE, end)
            offset = first - sequence.num_computed
            logits = self.runner.project(hidden[offset : offset + last - first])
            next_ids = request.prompt_ids[first + 1 : last + 1]
            scores += prompt_logprobs(logits, next_ids, request.num_prompt_logprobs)
        sequence.num_scored = max(start, end)
        return tuple(scores)

    def _expire(self) -> list[Output]:
        """End the requests whose deadline has passed, queued ones too."""
        now = time.monotonic()
        if now < self._next_deadline:
            return []
        deadlines = {
            request_id: math.inf if sequence.request.deadline is None else sequence.request.deadline
            for request_id, sequence in self._sequences.items()
        }
        self._next_deadline = min((d for d in deadlines.values() if d > now), default=math.inf)
        overdue = [request_id for request_id, deadline in deadlines.items() if deadline <= now]
        return [
            out for request_id in overdue for out in self.abort(request_id, FinishReason.DEADLINE)
        ]

    def _retire(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        self.scheduler.remove(sequence)
        if self.drafter is not None:
            self.drafter.forget(sequence)
