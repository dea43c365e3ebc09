"""What a step leaves behind: tokens enter sequences, counts are kept, outputs are made.

Knows nothing of queues and blocks; Engine acts on the outputs that carry a finish.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import replace

from headway.engine.batch import Scheduled
from headway.engine.request import Finish, FinishReason, Output, SpeculationStats, TokenLogprobs
from headway.engine.sampler import Accepted
from headway.engine.sequence import Sequence
from headway.engine.stats import EngineCounters
from headway.engine.tree import DraftTree


def commit_chunk(
    part: Scheduled, prompt_logprobs: tuple[TokenLogprobs, ...], counters: EngineCounters
) -> Output:
    """Count a prompt chunk that ends before its sequence does."""
    _count_computed(part, counters)
    return _output(part.sequence, prompt_logprobs=prompt_logprobs)


def commit_sample(
    part: Scheduled,
    tree: DraftTree,
    accepted: Accepted,
    prompt_logprobs: tuple[TokenLogprobs, ...],
    eos_token_ids: Seq[int],
    counters: EngineCounters,
) -> Output:
    """Append what was accepted, up to the first token that ends the sequence."""
    sequence = part.sequence
    _count_computed(part, counters)
    num_before = len(sequence.tokens)
    finish = sequence.extend(accepted.token_ids, eos_token_ids)
    if finish is None and accepted.error:
        finish = Finish(FinishReason.ERROR, message=accepted.error)
    emitted = tuple(sequence.tokens[num_before:])
    num_accepted = min(len(accepted.path) - 1, len(emitted))
    sequence.num_computed += num_accepted
    _count_speculation(sequence, tree.num_drafted, num_accepted, len(emitted), counters)
    if not sequence.timing.first_token:
        sequence.timing = replace(sequence.timing, first_token=time.monotonic())
    return _output(
        sequence,
        token_ids=emitted,
        logprobs=accepted.logprobs[: len(emitted)],
        prompt_logprobs=prompt_logprobs,
        finish=finish,
    )


def end(sequence: Sequence, reason: FinishReason, message: str = "") -> Output:
    """The last output of a sequence that ends for another reason than its tokens."""
    return _output(sequence, finish=Finish(reason, message=message))


def _output(
    sequence: Sequence,
    *,
    finish: Finish | None = None,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] = (),
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
) -> Output:
    if finish is not None:
        sequence.timing = replace(sequence.timing, finished=time.monotonic())
        finish = replace(finish, speculation=sequence.speculation)
    return Output(
        request_id=sequence.request.request_id,
        timing=sequence.timing,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=sequence.num_cached_tokens,
        finish=finish,
    )


def _count_computed(part: Scheduled, counters: EngineCounters) -> None:
    sequence = part.sequence
    start, end = sequence.num_computed, sequence.num_computed + part.span
    first_new = max(start, sequence.num_preempted_tokens)
    counters.prompt_computed_tokens += max(0, min(end, sequence.num_prompt_tokens) - first_new)
    counters.recomputed_tokens += min(first_new, end) - start
    sequence.num_computed = end


def _count_speculation(
    sequence: Sequence, drafted: int, accepted: int, emitted: int, counters: EngineCounters
) -> None:
    counters.generated_tokens += emitted
    if not emitted:
        return
    stats = sequence.speculation
    sequence.speculation = SpeculationStats(
        num_steps=stats.num_steps + 1,
        num_drafted=stats.num_drafted + drafted,
        num_accepted=stats.num_accepted + accepted,
        num_emitted=stats.num_emitted + emitted,
        accepted_per_position=_add_run(stats.accepted_per_position, accepted),
    )
    if drafted:
        counters.spec_drafted_tokens += drafted
        counters.spec_emitted_tokens += emitted
        counters.spec_accepted_lengths[accepted] += 1


def _add_run(per_position: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Add one to the first `length` entries; ones that are not there yet count as 0."""
    run = [count + 1 for count in per_position[:length]] + [1] * (length - len(per_position))
    return (*run, *per_position[length:])
