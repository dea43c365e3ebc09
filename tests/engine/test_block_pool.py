"""BlockPool: sharing by content and salt, and the books after thousands of random moves."""

import random

import pytest

from headway.engine.block_pool import BlockPool
from headway.engine.request import Request, StoppingParams
from headway.engine.sequence import Sequence


def sequence(tokens: list[int], **changes: object) -> Sequence:
    request = Request("r", tuple(tokens), StoppingParams(100), **changes)  # type: ignore[arg-type]
    return Sequence(request, arrived=0.0)


def compute(pool: BlockPool, run: Sequence, num_tokens: int | None = None) -> None:
    """Hold blocks for the tokens, as if a step had computed them."""
    num_tokens = len(run.tokens) if num_tokens is None else num_tokens
    assert pool.grow(run, num_tokens)
    run.num_computed = num_tokens
    pool.publish(run)


def admit(pool: BlockPool, tokens: list[int], **changes: object) -> Sequence:
    run = sequence(tokens, **changes)
    pool.share_prefix(run)
    return run


def test_the_worked_example() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    first = admit(pool, [1, 2, 3, 4, 5])
    assert first.num_computed == 0
    compute(pool, first)
    blocks = list(first.block_table)
    pool.release(first)
    assert (pool.num_cached, pool.num_active) == (2, 0)
    second = admit(pool, [1, 2, 3, 4, 6])
    assert (second.num_computed, second.block_table) == (4, blocks[:2])
    third = admit(pool, [1, 2, 9])
    assert (third.num_computed, third.block_table) == (2, blocks[:1])
    assert admit(pool, [1, 2, 3, 4, 6], cache_salt="tenant").num_computed == 0


@pytest.mark.parametrize(
    "changes", [{"use_prefix_cache": False}, {"num_prompt_logprobs": 0}, {"cache_salt": "x"}]
)
def test_who_does_not_share(changes: dict[str, object]) -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    compute(pool, admit(pool, [1, 2, 3, 4]))
    assert admit(pool, [1, 2, 3, 4], **changes).num_computed == 0


def test_bypassing_the_cache_does_not_fill_it() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    run = admit(pool, [1, 2, 3, 4], use_prefix_cache=False)
    compute(pool, run)
    pool.release(run)
    assert pool.num_cached == 0


def test_one_token_is_always_left_to_compute() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    compute(pool, admit(pool, [1, 2, 3, 4]))
    assert admit(pool, [1, 2, 3, 4]).num_computed == 2


def test_a_block_hash_stands_for_everything_before_it() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    compute(pool, admit(pool, [1, 2, 3, 4]))
    assert admit(pool, [9, 9, 3, 4, 5]).num_computed == 0


def test_grow_changes_nothing_without_room() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    run = sequence([1])
    assert not pool.grow(run, 5)
    assert run.block_table == []
    assert pool.grow(run, 4)
    assert pool.num_available == 0


def test_the_end_of_the_longest_unused_prefix_is_reclaimed_first() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    old, new = admit(pool, [1, 2, 3, 4]), admit(pool, [5, 6, 7, 8])
    for run in (old, new):
        compute(pool, run)
        pool.release(run)
    assert pool.grow(sequence([0]), 1)
    assert pool.num_evicted == 1
    assert admit(pool, [1, 2, 3, 4, 5]).num_computed == 2
    assert admit(pool, [5, 6, 7, 8, 9]).num_computed == 4


@pytest.mark.parametrize("seed", range(5))
def test_books_balance_after_random_moves(seed: int) -> None:
    """No block in two places, every token under the right content, all blocks back at the end."""
    rng = random.Random(seed)
    pool = BlockPool(num_blocks=13, block_size=3)
    content: dict[int, list[int]] = {}
    live: list[Sequence] = []
    for _ in range(2_000):
        if rng.random() < 0.4 and len(live) < 5:
            run = admit(pool, [rng.randrange(2) for _ in range(rng.randrange(1, 14))])
            for index in range(run.num_computed // 3):
                assert content[run.block_table[index]] == run.tokens[: index * 3 + 3]
            live.append(run)
        elif live and rng.random() < 0.6:
            run = rng.choice(live)
            run.tokens.append(rng.randrange(2))
            num_tokens = rng.randrange(run.num_computed, len(run.tokens) + 1)
            if pool.grow(run, num_tokens):
                run.num_computed = num_tokens
                for index in range(num_tokens // 3):
                    content[run.block_table[index]] = run.tokens[: index * 3 + 3]
                pool.publish(run)
        elif live:
            pool.release(live.pop(rng.randrange(len(live))))
        held = {block for run in live for block in run.block_table}
        assert len(held) == pool.num_active
        assert pool.num_active + pool.num_available == 13
        for run in live:
            assert len(set(run.block_table)) == len(run.block_table)
            assert len(run.block_table) * 3 >= run.num_computed
    for run in live:
        pool.release(run)
    assert pool.num_active == 0
    assert pool.num_available == 13
