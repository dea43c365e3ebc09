"""Times the native attention of one pass of the default model's shape.

    python tests/bench/kernel_attention.py [--threads 2] [--level avx512]

With one thread its own processor time counts, which a busy machine changes less.

A pass is 30 layers with caches of their own, so that none is found in a core's cache. The least of
several runs counts; GB/s are of keys and values read once, GMAC/s of products of what is seen.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch

from headway.kernels.attention import CACHE_TYPES, attention_scratch_bytes
from headway.kernels.cpu.build import build
from headway.kernels.cpu.library import Library, Team

LAYERS, HEADS, GROUPS, SIZE, BLOCK = 30, 9, 3, 64, 16


@dataclass(frozen=True)
class Case:
    name: str
    contexts: tuple[int, ...]
    span: int
    num_nodes: int = 0
    window: int = 0


CASES = [
    *(Case(f"1 row at {context}", (context,), 1) for context in (64, 256, 1024, 4096)),
    Case("1 row at 4096, window 512", (4096,), 1, window=512),
    *(Case(f"tree of {nodes} at {at}", (at,), 1, nodes - 1) for nodes in (4, 16, 64) for at in (256, 1024)),
    Case("8 sequences of 1 row at 512", (512,) * 8, 1),
    Case("16 sequences of 4 rows at 512", (512,) * 16, 1, 3),
    Case("uneven: 2048 and 7 of 64", (2048, *(64,) * 7), 1),
    Case("prefill of 128", (0,), 128),
    Case("prefill of 512", (0,), 512),
    Case("prefill of 512 after 2048", (2048,), 512),
]  # fmt: skip


def pass_of(case: Case, dtype: torch.dtype, team: Team) -> tuple[Callable[[], None], int, int]:
    """What runs one pass, the bytes it reads and the multiply-adds it does."""
    per_sequence = case.span + case.num_nodes
    rows = per_sequence * len(case.contexts)
    blocks = [-(-(context + per_sequence) // BLOCK) for context in case.contexts]
    order = torch.randperm(sum(blocks)).int().split(blocks)
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for table, own in zip(tables, order, strict=True):
        table[: len(own)] = own
    shape = (LAYERS, 2, sum(blocks) * BLOCK, GROUPS, SIZE)
    cache = (torch.randn(shape) * (20 if dtype == torch.int8 else 1)).to(dtype)
    scales = torch.full(shape[:-1], 0.05)
    positions: list[int] = []
    masks: list[int] = []
    for context in case.contexts:
        root = context + case.span - 1
        positions += range(context, root + 1)
        masks += [0] * case.span
        lineage = [1]
        for node in range(1, case.num_nodes + 1):
            lineage.append(lineage[(node - 1) // 2] | 1 << node)
            positions.append(root + lineage[-1].bit_count() - 1)
            masks.append(lineage[-1] - (1 << 64) if lineage[-1] >> 63 else lineage[-1])
    query, out = torch.randn(rows, HEADS, SIZE), torch.empty(rows, HEADS, SIZE)
    num_bytes = attention_scratch_bytes(team.num_threads, HEADS, GROUPS, SIZE)
    scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
    scratch = scratch[-scratch.data_ptr() % 64 :]
    tensors = (
        tables,
        torch.arange(0, rows + 1, per_sequence).int(),
        torch.tensor(case.contexts).int(),
        torch.full((len(blocks),), case.span).int(),
        torch.tensor(positions),
        torch.tensor(masks),
    )
    kernel = team.library.kernels["attention"]
    words = [
        word
        for layer in range(LAYERS)
        for word in kernel.encode(
            {
                "query": query, "query_stride": HEADS * SIZE, "query_head_stride": SIZE,
                "key_cache": cache[layer, 0], "value_cache": cache[layer, 1],
                "key_scales": scales[layer, 0], "value_scales": scales[layer, 1],
                "cache_type": CACHE_TYPES[dtype], "slot_stride": GROUPS * SIZE,
                "block_tables": tables, "table_stride": tables.stride(0), "block_size": BLOCK,
                "cu_lengths": tensors[1], "context_lengths": tensors[2], "span_lengths": tensors[3],
                "positions": tensors[4], "tree_masks": tensors[5], "num_sequences": len(blocks),
                "num_heads": HEADS, "num_groups": GROUPS, "head_size": SIZE, "window": case.window,
                "scale": 0.125, "softcap": 0.0, "out": out, "out_stride": HEADS * SIZE, "out_head_stride": SIZE,
                "scratch": scratch, "scratch_bytes": num_bytes,
            }
        )
    ]  # fmt: skip
    program = np.array(words, dtype=np.int64)
    held = (cache, scales, tensors, query, out, scratch)

    def run() -> None:
        assert held
        team.run(program)

    limit = case.window or 1 << 30
    read = sum(min(context + per_sequence, limit + case.span) for context in case.contexts)
    seen = sum(min(position + 1, limit) for position in positions)
    return (
        run,
        LAYERS * 2 * read * GROUPS * SIZE * dtype.itemsize,
        LAYERS * 2 * seen * HEADS * SIZE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level", default="avx512")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--only", nargs="*", default=[""])
    options = parser.parse_args()
    torch.manual_seed(1)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    library = Library(build(options.level, Path(gettempdir()) / "headway-bench"), options.level)
    team = Team(library, options.threads)
    print(f"{'ms per pass':32}" + "".join(f"{name:>28}" for name in options.dtype))
    for case in CASES:
        if not any(case.name.startswith(name) for name in options.only):
            continue
        line = f"{case.name:32}"
        for name in options.dtype:
            run, num_bytes, operations = pass_of(case, getattr(torch, name), team)
            times = []
            for _ in range(options.runs):
                start = clock()
                run()
                times.append(clock() - start)
            best = min(times)
            rate = f"{num_bytes / best / 1e9:.1f} GB/s {operations / best / 1e9:.0f} GMAC/s"
            line += f"{best * 1e3:8.2f} {rate:>19}"
        print(line, flush=True)
    team.close()


if __name__ == "__main__":
    main()
