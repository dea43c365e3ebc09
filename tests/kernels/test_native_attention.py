"""The native attention: against the reference, and its promises about bits."""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from headway.kernels.attention import CACHE_TYPES, move_kv, paged_attention, write_kv
from headway.kernels.cpu.library import Team


@dataclass(frozen=True)
class Part:
    """One sequence's part of a step; parents[i] is the parent of node i + 1, 0 the root."""

    context: int
    span: int
    parents: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.span + len(self.parents)


@dataclass(frozen=True)
class Shape:
    heads: int = 3
    groups: int = 1
    size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None


class Cache:
    """Caches whose slots are NaN until they are written, and the tables of some sequences."""

    def __init__(self, shape: Shape, lengths: list[int]) -> None:
        self.shape = shape
        counts = [-(-length // shape.block_size) for length in lengths]
        blocks = list(range(1, sum(counts) + 3))
        random.Random(5).shuffle(blocks)
        self.tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        for table, count in zip(self.tables, counts, strict=True):
            table[:count] = torch.tensor([blocks.pop() for _ in range(count)])
        num_slots = (sum(counts) + 4) * shape.block_size
        size = (num_slots, shape.groups, shape.size)
        is_int8 = shape.dtype == torch.int8
        self.keys, self.values = (
            torch.full(size, 127 if is_int8 else torch.nan).to(shape.dtype) for _ in range(2)
        )
        self.key_scales, self.value_scales = (
            torch.full(size[:2], torch.nan) if is_int8 else None for _ in range(2)
        )

    def slot(self, sequence: int, index: int) -> int:
        size = self.shape.block_size
        return int(self.tables[sequence, index // size]) * size + index % size

    def write(
        self, sequence: int, indices: list[int], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        slots = torch.tensor([self.slot(sequence, index) for index in indices], dtype=torch.int64)
        write_kv(
            keys,
            values,
            self.keys,
            self.values,
            slots,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
        )


def random_tree(num_nodes: int, seed: int) -> tuple[int, ...]:
    chooser = random.Random(seed)
    parents = sorted(chooser.randrange(max(1, node)) for node in range(num_nodes))
    return tuple(min(parent, node) for node, parent in enumerate(parents))


def fill(cache: Cache, parts: list[Part]) -> None:
    """Write random keys and values for everything that the parts see, and nothing else."""
    for index, part in enumerate(parts):
        total = part.context + part.num_rows
        rows = (total, cache.shape.groups, cache.shape.size)
        cache.write(index, list(range(total)), torch.randn(rows), torch.randn(rows))


def attend(cache: Cache, parts: list[Part], query: torch.Tensor, team: Team | None) -> torch.Tensor:
    """parts[i] is sequence i of the cache."""
    positions: list[int] = []
    masks: list[int] = []
    for part in parts:
        root = part.context + part.span - 1
        positions += range(part.context, root + 1)
        masks += [0] * (part.span - 1) + [1]
        lineage, depths = [1], [0]
        for node, parent in enumerate(part.parents, start=1):
            lineage.append(lineage[parent] | 1 << node)
            depths.append(depths[parent] + 1)
        positions += [root + depth for depth in depths[1:]]
        masks += [mask - (1 << 64) if mask >> 63 else mask for mask in lineage[1:]]
    lengths = [0, *itertools.accumulate(part.num_rows for part in parts)]
    return paged_attention(
        query,
        cache.keys,
        cache.values,
        block_tables=cache.tables[: len(parts)],
        block_size=cache.shape.block_size,
        cu_lengths=torch.tensor(lengths, dtype=torch.int32),
        context_lengths=torch.tensor([part.context for part in parts], dtype=torch.int32),
        span_lengths=torch.tensor([part.span for part in parts], dtype=torch.int32),
        positions=torch.tensor(positions),
        tree_masks=torch.tensor(masks),
        scale=0.3,
        window=cache.shape.window,
        softcap=cache.shape.softcap,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        team=team,
    )


PARTS = {
    "one_row": [Part(0, 1)],
    "decode": [Part(200, 1)],
    "edges": [Part(length, 1) for length in (62, 63, 64, 65, 127, 128)],
    "prefill": [Part(0, 150)],
    "chunk": [Part(70, 90), Part(3, 7)],
    "chain": [Part(120, 1, tuple(range(9)))],
    "tree": [Part(61, 2, random_tree(63, 1))],
    "deep_tree": [Part(40, 1, tuple(range(63)))],
    "mixed": [Part(0, 40), Part(130, 1, random_tree(20, 2)), Part(5, 1), Part(63, 3, (0, 0, 1))],
}
SHAPES = {
    "plain": Shape(),
    "group_of_1": Shape(heads=2, groups=2, size=32, block_size=1),
    "group_of_4": Shape(heads=8, groups=2, size=64, block_size=17),
    "group_of_8": Shape(heads=8, size=80, softcap=2.0),
    "smollm2": Shape(heads=9, groups=3, size=64, dtype=torch.bfloat16),
    "window": Shape(window=50, size=96, block_size=17),
    "narrow_window": Shape(window=3, dtype=torch.int8, size=40),
    "window_of_one": Shape(window=1, size=7, heads=1),
    "int8": Shape(heads=4, groups=2, size=128, dtype=torch.int8),
    "wide": Shape(heads=4, size=256, dtype=torch.bfloat16, window=70, softcap=5.0),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference(team: Team, shape: Shape) -> None:
    for parts in PARTS.values():
        torch.manual_seed(1)
        cache = Cache(shape, [part.context + part.num_rows for part in parts])
        fill(cache, parts)
        query = torch.randn(sum(part.num_rows for part in parts), shape.heads, shape.size + 1)
        query = query[..., 1:]
        expected = attend(cache, parts, query, None)
        output = attend(cache, parts, query, team)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_row_alone_has_the_same_bits(team: Team, shape: Shape) -> None:
    """Whatever is computed beside it: as a decoded row, in a prefill, in a batch, as a tree's node."""
    torch.manual_seed(2)
    path_length, context = 140, 50
    rows = (path_length, shape.groups, shape.size)
    keys, values = torch.randn(rows), torch.randn(rows)
    query = torch.randn(path_length, shape.heads, shape.size)
    cache = Cache(shape, [path_length + 70, 90])
    fill(cache, [Part(0, 0), Part(80, 1)])
    cache.write(0, list(range(path_length)), keys, values)
    whole = attend(cache, [Part(0, path_length)], query, team)
    for row in (0, 1, 63, 64, 65, 128, 139):
        alone = attend(cache, [Part(row, 1)], query[row : row + 1], team)
        assert torch.equal(alone, whole[row : row + 1])
    chunk = attend(cache, [Part(55, 50), Part(80, 1)], torch.cat([query[55:105], query[:1]]), team)
    assert torch.equal(chunk[:50], whole[55:105])
    # The path's tokens as nodes of a tree: among them, siblings with other keys.
    for span in (1, 4):
        root = context + span - 1
        cache.write(0, list(range(path_length)), keys, values)
        parents, tokens = [], []
        node_of = {root: 0}
        for position in range(root + 1, root + 31):
            parents += [node_of[position - 1], node_of[position - 1]]
            tokens += [None, position]
            node_of[position] = len(parents)
        part = Part(context, span, tuple(parents))
        for node, token in enumerate(tokens, start=1):
            source = (
                torch.randn(2, 1, *rows[1:]) if token is None else (keys[[token]], values[[token]])
            )
            cache.write(0, [root + node], *source)
        order = [*range(context, root + 1), *(0 if token is None else token for token in tokens)]
        tree = attend(cache, [part], query[order], team)
        for node, token in enumerate(tokens, start=1):
            if token is not None:
                assert torch.equal(tree[span - 1 + node], whole[token]), (span, node)


def test_every_team_and_level_gives_the_same_bits(
    team: Team, first_results: dict[str, torch.Tensor]
) -> None:
    for (name, parts), shape in itertools.product(
        PARTS.items(), (SHAPES["smollm2"], SHAPES["int8"])
    ):
        torch.manual_seed(3)
        cache = Cache(shape, [part.context + part.num_rows for part in parts])
        fill(cache, parts)
        query = torch.randn(sum(part.num_rows for part in parts), shape.heads, shape.size)
        output = attend(cache, parts, query, team)
        expected = first_results.setdefault(f"{name} {shape}", output)
        assert torch.equal(output, expected), name


@pytest.fixture(scope="module")
def first_results() -> dict[str, torch.Tensor]:
    """What the first team of all computed."""
    return {}


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_write_kv_equals_the_reference(team: Team, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    for size in (1, 7, 16, 40, 64):
        rows = torch.randn(5, 3, 2, size + 1)[..., 1:] * 3
        rows[2, 1] = 0
        caches, scales = (
            torch.full((2, 2, 9, 3, size), 7.0).to(dtype),
            torch.full((2, 2, 9, 3), 7.0),
        )
        for body, cache, scale in zip((None, team), caches, scales, strict=True):
            write_kv(
                rows[:, :, 0],
                rows[:, :, 1],
                *cache,
                torch.tensor([8, 0, 3, 4, 1]),
                key_scales=scale[0] if dtype == torch.int8 else None,
                value_scales=scale[1] if dtype == torch.int8 else None,
                team=body,
            )
        assert torch.equal(caches[0], caches[1])
        assert torch.equal(scales[0], scales[1])
        assert (caches[1, :, [2, 5, 6, 7]] == 7).all()
        if dtype == torch.int8:
            read = caches[1, 0].float() * scales[1, 0][..., None]
            error = (read[[8, 0, 3, 4, 1]] - rows[:, :, 0]).abs()
            assert (error <= scales[1, 0, [8, 0, 3, 4, 1]][..., None] * 0.5001).all()


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_move_kv_reads_everything_before_it_writes(team: Team, dtype: torch.dtype) -> None:
    cache = torch.randint(-100, 100, (3, 2, 9, 2, 5)).to(dtype)
    expected = cache.clone()
    sources, targets = torch.tensor([3, 5, 8]), torch.tensor([2, 3, 4])
    move_kv(expected, sources, targets)
    move_kv(cache, sources, targets, team)
    assert torch.equal(cache, expected)
    move_kv(cache, sources[:0], targets[:0], team)
    assert torch.equal(cache, expected)


def test_scales_belong_to_int8() -> None:
    cache = Cache(Shape(dtype=torch.int8), [5])
    bare = Cache(Shape(), [5])
    query = torch.zeros(1, 3, 16)
    with pytest.raises(ValueError, match="int8 has scales"):
        attend(replace_scales(cache, None), [Part(0, 1)], query, None)
    with pytest.raises(ValueError, match="int8 has scales"):
        attend(replace_scales(bare, torch.zeros(5, 1)), [Part(0, 1)], query, None)


def replace_scales(cache: Cache, scales: torch.Tensor | None) -> Cache:
    cache.key_scales = scales
    return cache
