"""paged_attention against a plain loop over rows and keys, in float64."""

import math
from dataclasses import dataclass

import pytest
import torch

from headway.kernels.attention import move_kv, paged_attention, write_kv

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Case:
    """contexts, spans and trees (parents of the drafted nodes, 0 is the root) of the sequences."""

    contexts: tuple[int, ...]
    spans: tuple[int, ...]
    trees: tuple[tuple[int, ...], ...]
    heads: int = 4
    groups: int = 2
    size: int = 8
    window: int | None = None
    softcap: float | None = None


CASES = {
    "one_row": Case((0,), (1,), ((),)),
    "decode": Case((13,), (1,), ((),)),
    "prefill": Case((0,), (11,), ((),), heads=3, groups=3, size=7),
    "chunk_after_context": Case((9,), (5,), ((),), heads=6, groups=2),
    "chain": Case((6,), (1,), ((0, 1, 2),)),
    "tree_after_span": Case((5,), (3,), ((0, 0, 1, 1, 2, 5),), heads=1, groups=1),
    "mixed": Case((0, 17, 4, 1), (7, 1, 1, 2), ((), (0, 0, 1), (), (0, 1))),
    "window": Case((15, 3), (1, 4), ((0, 1, 1, 3), (0,)), window=5),
    "window_of_one": Case((6,), (2,), ((0, 0),), window=1),
    "softcap": Case((7,), (3,), ((0,),), softcap=1.5),
}


@dataclass(frozen=True)
class Layout:
    tensors: dict[str, torch.Tensor]
    keys_of_row: list[list[tuple[int, int]]]
    """For each row the (slot, position) pairs it may see."""
    position_of_row: list[int]


def lay_out(case: Case, num_blocks: int) -> Layout:
    free = torch.randperm(num_blocks).tolist()
    positions: list[int] = []
    masks: list[int] = []
    cu_lengths, tables = [0], []
    keys_of_row: list[list[tuple[int, int]]] = []
    for context, span, parents in zip(case.contexts, case.spans, case.trees, strict=True):
        total = context + span + len(parents)
        table = [free.pop() for _ in range(math.ceil(total / BLOCK_SIZE))]
        slot = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(total)]
        own = context + span
        for index in range(context, own):
            positions.append(index)
            masks.append(1 if index == own - 1 else 0)
            keys_of_row.append([(slot[k], k) for k in range(index + 1)])
        lineage, depths = [[0]], [0]
        for node, parent in enumerate(parents, start=1):
            lineage.append([*lineage[parent], node])
            depths.append(depths[parent] + 1)
            positions.append(own - 1 + depths[node])
            mask = sum(1 << ancestor for ancestor in lineage[node])
            masks.append(mask - (1 << 64) if mask >> 63 else mask)
            keys_of_row.append(
                [(slot[k], k) for k in range(own)]
                + [(slot[own - 1 + n], own - 1 + depths[n]) for n in lineage[node][1:]]
            )
        cu_lengths.append(len(positions))
        tables.append(table)
    width = max(map(len, tables))
    tensors = {
        "block_tables": torch.tensor([t + [0] * (width - len(t)) for t in tables]).int(),
        "cu_lengths": torch.tensor(cu_lengths).int(),
        "context_lengths": torch.tensor(case.contexts).int(),
        "span_lengths": torch.tensor(case.spans).int(),
        "positions": torch.tensor(positions),
        "tree_masks": torch.tensor(masks),
    }
    return Layout(tensors, keys_of_row, positions)


def by_hand(
    case: Case, layout: Layout, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    output = torch.zeros_like(query, dtype=torch.float64)
    ratio = case.heads // case.groups
    for row, pairs in enumerate(layout.keys_of_row):
        position = layout.position_of_row[row]
        seen = [s for s, p in pairs if case.window is None or position - p < case.window]
        for head in range(case.heads):
            group = head // ratio
            scores = keys[seen, group].double() @ query[row, head].double() * 0.3
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            weights = torch.exp(scores - scores.max())
            output[row, head] = (weights / weights.sum()) @ values[seen, group].double()
    return output


def attend(
    case: Case, layout: Layout, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    return paged_attention(
        query,
        keys,
        values,
        block_size=BLOCK_SIZE,
        scale=0.3,
        window=case.window,
        softcap=case.softcap,
        **layout.tensors,
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_a_loop_over_rows_and_keys(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    layout = lay_out(case, num_blocks=20)
    shape = (20 * BLOCK_SIZE, case.groups, case.size)
    keys, values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    query = torch.randn(len(layout.keys_of_row), case.heads, case.size).to(dtype)
    output = attend(case, layout, query, keys, values)
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.double(), by_hand(case, layout, query, keys, values), atol=tolerance, rtol=tolerance
    )


def test_a_full_tree_uses_the_sign_bit() -> None:
    case = Case((2,), (1,), (tuple(range(63)),))
    torch.manual_seed(2)
    layout = lay_out(case, num_blocks=20)
    assert layout.tensors["tree_masks"].min() < 0
    keys, values = torch.randn(80, 2, 8), torch.randn(80, 2, 8)
    query = torch.randn(64, 4, 8)
    expected = by_hand(case, layout, query, keys, values)
    torch.testing.assert_close(
        attend(case, layout, query, keys, values).double(), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(1, 4, 5)}, "must agree"),
        ({"query": torch.zeros(1, 3, 8)}, "no multiple"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "one entry for each"),
    ],
)
def test_wrong_shapes_are_named(changes: dict[str, torch.Tensor], message: str) -> None:
    layout = lay_out(CASES["one_row"], num_blocks=1)
    arguments = {
        "query": torch.zeros(1, 4, 8),
        "key_cache": torch.zeros(4, 2, 8),
        "value_cache": torch.zeros(4, 2, 8),
        **layout.tensors,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments, block_size=BLOCK_SIZE, scale=1.0)  # type: ignore[arg-type]


def test_write_kv_fills_the_slots_and_no_others() -> None:
    keys, values = torch.zeros(6, 2, 3), torch.zeros(6, 2, 3)
    new_keys, new_values = torch.randn(2, 2, 3), torch.randn(2, 2, 3)
    write_kv(new_keys, new_values, keys, values, torch.tensor([4, 1]))
    assert torch.equal(keys[[4, 1]], new_keys)
    assert torch.equal(values[[4, 1]], new_values)
    assert not keys[[0, 2, 3, 5]].any()


def test_write_kv_names_wrong_shapes() -> None:
    cache = torch.zeros(6, 2, 3)
    with pytest.raises(ValueError, match="must agree"):
        write_kv(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), cache, cache, torch.tensor([0]))


def test_move_kv_reads_everything_before_it_writes() -> None:
    cache = torch.arange(5.0)[None, None, :, None, None].repeat(2, 2, 1, 3, 4)
    move_kv(cache, torch.tensor([2, 3]), torch.tensor([1, 2]))
    assert cache[1, 0, :, 2, 3].tolist() == [0, 2, 3, 3, 4]
