"""build_input: the flat row of a step, by hand."""

import pytest
import torch

from headway.engine.batch import Batch, Scheduled, Staging, build_input, slot_range
from headway.engine.kv_cache import KVCache, block_bytes
from headway.engine.request import Request, StoppingParams
from headway.engine.sequence import Sequence
from headway.engine.tree import DraftTree
from tiny import tiny_config


def sequence(tokens: list[int], num_computed: int, block_table: list[int]) -> Sequence:
    run = Sequence(Request("x", tuple(tokens), StoppingParams(9)), arrived=0.0)
    run.num_computed = num_computed
    run.block_table = block_table
    return run


def cache() -> KVCache:
    return KVCache(tiny_config(), 8, 4, torch.float32, torch.device("cpu"))


def test_spans_trees_and_chunks_in_one_row() -> None:
    decoding = sequence([30, 31, 32, 33, 34], 4, [6, 2])
    filling = sequence([40, 41, 42], 0, [1])
    batch = Batch((Scheduled(decoding, 1, 3),), (Scheduled(filling, 2, 0),))
    tree = DraftTree((34, 50, 51, 52), (-1, 0, 0, 1))
    row = build_input(batch, [tree], cache())
    assert row.token_ids.tolist() == [34, 50, 51, 52, 40, 41]
    assert row.positions.tolist() == [4, 5, 5, 6, 0, 1]
    assert row.slots.tolist() == [8, 9, 10, 11, 4, 5]
    assert row.tree_masks.tolist() == [0b1, 0b11, 0b101, 0b1011, 0, 0]
    assert row.cu_lengths.tolist() == [0, 4, 6]
    assert row.context_lengths.tolist() == [4, 0]
    assert row.span_lengths.tolist() == [1, 2]
    assert row.block_tables.tolist() == [[6, 2], [1, 0]]
    assert row.logit_rows.tolist() == [0, 1, 2, 3]


def test_a_prompt_that_samples_has_its_logits_at_the_end() -> None:
    run = sequence([30, 31, 32], 0, [6])
    row = build_input(Batch((Scheduled(run, 3, 1),), ()), [DraftTree.chain(32, [60])], cache())
    assert row.token_ids.tolist() == [30, 31, 32, 60]
    assert row.tree_masks.tolist() == [0, 0, 0b1, 0b11]
    assert row.logit_rows.tolist() == [2, 3]


def test_node_63_is_the_sign_bit() -> None:
    run = sequence([30], 0, list(range(8)) * 3)
    tree = DraftTree.chain(30, range(63))
    row = build_input(Batch((Scheduled(run, 1, 63),), ()), [tree], cache())
    assert row.tree_masks[-1].item() == -1
    assert row.tree_masks[-2].item() == 2**63 - 1


def test_slots_follow_the_block_table() -> None:
    assert slot_range(sequence([1], 0, [6, 2]), 2, 7, 4) == [26, 27, 8, 9, 10]


def test_cache_moves_and_sizes() -> None:
    kv = cache()
    assert kv.data.shape == (2, 2, 32, 2, 8)
    assert kv.data.nbytes == 8 * block_bytes(tiny_config(), 4, torch.float32)
    kv.data[...] = torch.arange(32.0)[:, None, None]
    kv.move([(5, 4), (6, 5)])
    assert kv.data[1, 0, 3:7, 1, 2].tolist() == [3, 5, 6, 6]
    kv.move([])


@pytest.mark.parametrize(
    ("dtype", "head_bytes"), [(torch.float32, 32), (torch.bfloat16, 16), (torch.int8, 8 + 4)]
)
def test_cache_memory_is_as_computed(dtype: torch.dtype, head_bytes: int) -> None:
    kv = KVCache(tiny_config(), 8, 4, dtype, torch.device("cpu"))
    num_bytes = kv.data.nbytes + (0 if kv.scales is None else kv.scales.nbytes)
    assert num_bytes == 8 * block_bytes(tiny_config(), 4, dtype)
    assert num_bytes == 2 * 2 * 32 * 2 * head_bytes  # layers, keys and values, slots, heads


def test_scales_move_with_their_codes() -> None:
    kv = KVCache(tiny_config(), 8, 4, torch.int8, torch.device("cpu"))
    assert kv.scales is not None
    kv.data[...] = torch.arange(32, dtype=torch.int8)[:, None, None]
    kv.scales[...] = torch.arange(32.0)[:, None]
    kv.move([(5, 4), (6, 5)])
    assert kv.data[1, 1, 3:7, 1, 7].tolist() == [3, 5, 6, 6]
    assert kv.scales[1, 1, 3:7, 1].tolist() == [3, 5, 6, 6]


def test_staging_gives_the_same_input_step_after_step() -> None:
    """Steps of other sizes in between, one beyond the first memory, one without logits."""
    staging, kv = Staging(torch.device("cpu")), cache()
    long = sequence(list(range(90)), 0, list(range(23)))
    batches = [
        (
            Batch((Scheduled(sequence([5, 6, 7], 2, [3, 9]), 1, 2),), ()),
            [DraftTree.chain(7, [8, 9])],
        ),
        (Batch((), (Scheduled(long, 80, 0),)), []),
        (
            Batch((Scheduled(sequence([5, 6], 1, [3, 4]), 1, 0),), (Scheduled(long, 7, 0),)),
            [DraftTree.root_only(6)],
        ),
    ]
    for batch, trees in batches * 2:
        staged = build_input(batch, trees, kv, staging)
        alone = build_input(batch, trees, kv)
        for ours, fresh in zip(staged[:9], alone[:9], strict=True):
            assert ours.dtype == fresh.dtype
            assert ours.tolist() == fresh.tolist()
    first = build_input(*batches[0], kv, staging)
    again = build_input(*batches[0], kv, staging)
    assert first.token_ids.data_ptr() == again.token_ids.data_ptr()
