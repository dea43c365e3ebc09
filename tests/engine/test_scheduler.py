"""Scheduler without a model: budgets, turns, fairness, admission and preemption."""

import random

import pytest

from headway.engine.batch import Batch
from headway.engine.block_pool import BlockPool
from headway.engine.config import EngineConfig
from headway.engine.request import SpeculationParams
from headway.engine.scheduler import Scheduler
from headway.engine.sequence import Sequence
from headway.engine.stats import EngineCounters
from tiny_engine import prompt, request


def scheduler(num_blocks: int = 64, **settings: object) -> Scheduler:
    values = {
        "block_size": 4,
        "max_batch_tokens": 40,
        "max_chunk_tokens": 16,
        "max_running_requests": 8,
        "max_draft_tokens": 4,
        **settings,
    }
    config = EngineConfig(**values)  # type: ignore[arg-type]
    pool = BlockPool(num_blocks, config.block_size, config.prefix_cache)
    return Scheduler(config, pool, EngineCounters())


def add(under_test: Scheduler, name: str, length: int, **changes: object) -> Sequence:
    run = Sequence(request(name, prompt(length, seed=hash(name) % 97), **changes), arrived=0.0)
    under_test.add(run)
    return run


def play(under_test: Scheduler, batch: Batch) -> None:
    """Pretend the step ran: spans are computed, sampling sequences get one token."""
    for part in batch.sampling + batch.filling:
        part.sequence.num_computed += part.span
        under_test.pool.publish(part.sequence)
    for part in batch.sampling:
        part.sequence.tokens.append(5)


def summary(batch: Batch) -> list[tuple[str, int, int]]:
    return [
        (part.sequence.request.request_id, part.span, part.max_drafted)
        for part in batch.sampling + batch.filling
    ]


def test_a_long_prompt_costs_a_stream_one_chunk_a_step() -> None:
    under_test = scheduler()
    add(under_test, "stream", 3)
    play(under_test, under_test.schedule())
    add(under_test, "long", 70)
    for span in (16, 16, 16, 16):
        batch = under_test.schedule()
        assert summary(batch) == [("stream", 1, 4), ("long", span, 0)]
        play(under_test, batch)
    assert summary(under_test.schedule()) == [("stream", 1, 4), ("long", 6, 4)]


def test_prompts_share_a_step() -> None:
    under_test = scheduler()
    add(under_test, "first", 30)
    add(under_test, "second", 30)
    add(under_test, "third", 30)
    assert summary(under_test.schedule()) == [("first", 16, 0), ("second", 16, 0), ("third", 8, 0)]


def test_priority_then_arrival() -> None:
    under_test = scheduler(max_running_requests=2)
    for name, priority in (("late", 1), ("a", 0), ("b", 0), ("urgent", -1)):
        add(under_test, name, 2, priority=priority)
    batch = under_test.schedule()
    assert [part.sequence.request.request_id for part in batch.sampling] == ["urgent", "a"]
    assert [run.request.request_id for run in under_test.waiting] != []


@pytest.mark.parametrize(
    ("speculation", "max_new", "expected"),
    [
        (SpeculationParams(), 24, 4),
        (SpeculationParams(max_draft_tokens=2), 24, 2),
        (SpeculationParams(max_draft_tokens=0), 24, 0),
        (SpeculationParams(max_draft_tokens=50), 24, 4),
        (SpeculationParams(enabled=False), 24, 0),
        (SpeculationParams(), 3, 2),
        (SpeculationParams(), 1, 0),
    ],
)
def test_how_many_nodes_may_be_drafted(
    speculation: SpeculationParams, max_new: int, expected: int
) -> None:
    under_test = scheduler()
    add(under_test, "one", 3, max_new=max_new, speculation=speculation)
    assert summary(under_test.schedule()) == [("one", 3, expected)]
    refused = expected == 0 and max_new > 1
    assert under_test.counters.spec_disabled == {
        "request": refused,
        "load": 0,
        "blocks": 0,
        "cost": 0,
    }


def test_a_full_step_leaves_no_drafts_and_says_so() -> None:
    under_test = scheduler(max_batch_tokens=9)
    add(under_test, "prompt", 9)
    assert summary(under_test.schedule()) == [("prompt", 9, 0)]
    assert under_test.counters.spec_disabled == {"request": 0, "load": 1, "blocks": 0, "cost": 0}


def test_nothing_is_counted_where_nothing_drafts() -> None:
    under_test = scheduler(max_draft_tokens=0)
    add(under_test, "one", 3, speculation=SpeculationParams(enabled=False))
    assert summary(under_test.schedule()) == [("one", 3, 0)]
    assert not any(under_test.counters.spec_disabled.values())


def test_drafts_leave_room_for_every_root_and_for_a_prompt() -> None:
    under_test = scheduler(max_draft_tokens=30)
    runs = [add(under_test, str(index), 2) for index in range(6)]
    while any(run.num_pending > 1 for run in runs):
        play(under_test, under_test.schedule())
    assert summary(under_test.schedule())[0] == ("0", 1, (40 - 6) // 6)
    add(under_test, "new", 16)
    batch = under_test.schedule()
    assert summary(batch)[0] == ("0", 1, (40 - 6 - 16) // 6)
    assert summary(batch)[-1] == ("new", 16, 0)


def test_without_blocks_drafts_go_first_then_the_last_in_turn() -> None:
    under_test = scheduler(num_blocks=6)
    first, last = add(under_test, "first", 7), add(under_test, "last", 6)
    play(under_test, under_test.schedule())
    assert under_test.running == [first, last]
    assert under_test.pool.num_available == 0
    first.tokens += [5] * 3
    first.num_computed += 3
    assert summary(under_test.schedule()) == [("first", 1, 0), ("last", 1, 4)]
    assert under_test.counters.spec_disabled == {"request": 0, "load": 0, "blocks": 1, "cost": 0}
    first.tokens += [5] * 2
    first.num_computed += 2
    batch = under_test.schedule()
    assert under_test.running == [first]
    assert under_test.waiting == [last]
    assert under_test.counters.preemptions == 1
    assert last.num_computed == 0
    assert last.block_table == []
    assert summary(batch) == [("first", 1, 0)]


def test_a_sequence_that_made_room_for_another_gets_no_blocks_in_its_old_turn() -> None:
    """It did where drafts of the step before had left it more blocks than it needs now."""
    under_test = scheduler(num_blocks=8, max_batch_tokens=20, max_draft_tokens=8)
    first, last = add(under_test, "first", 4), add(under_test, "last", 4)
    for _ in range(2):
        play(under_test, under_test.schedule())
    assert under_test.pool.num_available == 0
    first.tokens += [5] * 11
    first.num_computed += 11
    add(under_test, "waiting", 40)
    assert summary(under_test.schedule()) == [("first", 1, 0), ("last", 2, 0)]
    assert under_test.counters.preemptions == 1
    assert len(last.block_table) == 2


def test_a_prompt_is_admitted_only_with_room_for_the_running_to_grow() -> None:
    under_test = scheduler(num_blocks=4)
    add(under_test, "first", 4, speculation=SpeculationParams(enabled=False))
    play(under_test, under_test.schedule())
    waiting = add(under_test, "second", 12)
    under_test.schedule()
    assert under_test.waiting == [waiting]
    assert waiting.block_table == []


def test_remove_frees_whatever_is_held() -> None:
    under_test = scheduler(max_running_requests=1)
    running, waiting = add(under_test, "running", 9), add(under_test, "waiting", 9)
    under_test.schedule()
    under_test.remove(waiting)
    under_test.remove(running)
    assert not under_test.has_work
    assert under_test.pool.num_active == 0


@pytest.mark.parametrize("seed", range(4))
def test_everyone_finishes_under_pressure(seed: int) -> None:
    """Random requests on a pool far too small: budgets hold in every step and nobody starves."""
    rng = random.Random(seed)
    under_test = scheduler(num_blocks=14, max_running_requests=5, max_draft_tokens=6)
    left = {}
    for index in range(20):
        run = add(under_test, str(index), rng.randint(1, 30), priority=rng.randint(0, 2))
        left[run.request.request_id] = rng.randint(1, 20)
    for _ in range(2_000):
        if not under_test.has_work:
            break
        batch = under_test.schedule()
        parts = batch.sampling + batch.filling
        assert parts, "work but nothing scheduled"
        assert sum(part.num_tokens for part in parts) <= 40
        for part in parts:
            assert part.sequence in under_test.running
            end = part.sequence.num_computed + part.span + part.max_drafted
            assert len(part.sequence.block_table) * 4 >= end
        play(under_test, batch)
        for part in batch.sampling:
            name = part.sequence.request.request_id
            left[name] -= 1
            if not left[name]:
                under_test.remove(part.sequence)
    assert not under_test.has_work
    assert under_test.pool.num_active == 0
