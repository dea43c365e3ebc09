"""Times the products of the default model: python tests/bench/kernel_linear.py --help.

Weights are random, of as many layers as the model has, so that decoding reads them from memory and
not from a cache. A figure is the least of many runs; the cores should be idle meanwhile. One thread
is timed by its own clock, which stands still while other processes have the core.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import get_args

import numpy as np
import torch

from headway.kernels.cpu.build import build
from headway.kernels.cpu.levels import LEVELS
from headway.kernels.cpu.library import Library, Team
from headway.kernels.linear import (
    ACTIVATION_NUMBERS,
    ROW_GROUP,
    output_head_scratch_bytes,
    row_bytes,
)
from headway.kernels.packed import FORMATS, FormatName, PackedWeight

NUM_LAYERS = 30


@dataclass(frozen=True)
class Shape:
    """A product of the default model."""

    name: str
    num_outputs: int
    num_inputs: int
    count: int = NUM_LAYERS
    gated: bool = False


SHAPES = (
    Shape("qkv", 960, 576),
    Shape("o", 576, 576),
    Shape("gate_up", 3072, 576, gated=True),
    Shape("down", 576, 1536),
    Shape("head", 49152, 576, count=1),
)


def random_panels(name: FormatName, shape: Shape) -> PackedWeight:
    """Any bits do for codes; scales must be small numbers, or infinities would slow nothing but lie."""
    form = FORMATS[name]
    panels, blocks = -(-shape.num_outputs // 16), -(-shape.num_inputs // form.block)
    data = torch.randint(0, 256, (panels, blocks, form.block_bytes), dtype=torch.uint8)
    if form.scale_bytes:
        scales_end = 16 * form.scale_bytes * (2 if form.has_minimum else 1)
        scale_type = torch.float16 if form.scale_bytes == 2 else torch.float32
        scales = torch.rand(panels, blocks, scales_end // form.scale_bytes) / 100
        data[..., :scales_end] = scales.to(scale_type).view(torch.uint8)
    else:
        value_type = torch.bfloat16 if name == "bf16" else torch.float32
        data = torch.randn(panels, blocks, 16 * form.block).to(value_type).view(torch.uint8)
    return PackedWeight(name, shape.num_outputs, shape.num_inputs, data)


class Case:
    """All products of one shape, a layer after another, in one run of the team."""

    def __init__(self, team: Team, shape: Shape, name: FormatName, num_rows: int, quantised: bool):
        self.team, self.shape = team, shape
        self.weights = [random_panels(name, shape) for _ in range(shape.count)]
        self.set_rows(num_rows, quantised)

    def set_rows(self, num_rows: int, quantised: bool) -> None:
        """Make the program for this many rows."""
        shape, kernels = self.shape, self.team.library.kernels
        x = torch.randn(num_rows, shape.num_inputs)
        padded = -(-num_rows // ROW_GROUP) * ROW_GROUP
        rows = torch.empty(padded, row_bytes(shape.num_inputs), dtype=torch.uint8)
        width = shape.num_outputs // 2 if shape.gated else shape.num_outputs
        out = torch.empty(num_rows, width) if shape.name != "head" else None
        scratch = output_head_scratch_bytes(num_rows, shape.num_outputs, 1, self.team.num_threads)
        best = (torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64))
        self.kept = (x, rows, out, best, torch.empty(scratch, dtype=torch.uint8))
        words: list[int] = []
        for weight in self.weights:
            if quantised:
                words += kernels["quantise_rows"].encode(
                    {"x": x, "x_stride": x.stride(0), "index": None, "num_rows": num_rows}
                    | {"num_inputs": shape.num_inputs, "out": rows}
                )
            product = {
                "x": rows if quantised else x,
                "x_stride": x.stride(0),
                "index": None,
                "num_rows": num_rows,
                "quantised": int(quantised),
                "weight": weight.data,
                "format": FORMATS[weight.format].number,
                "num_outputs": shape.num_outputs,
                "num_inputs": shape.num_inputs,
                "bias": None,
            }
            if out is not None:
                product |= {"out": out, "out_stride": width, "residual": None}
                product |= {"residual_stride": 0}
                product |= {"activation": ACTIVATION_NUMBERS["silu" if shape.gated else None]}
                words += kernels["linear"].encode(product)
            else:
                product |= {"softcap": 0.0, "logits": None, "logits_stride": 0, "num_top": 1}
                product |= {"values": best[0], "indices": best[1], "log_sums": None}
                product |= {"scratch": self.kept[-1]}
                words += kernels["output_head"].encode(product)
        self.words = np.array(words, dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        return sum(weight.data.numel() for weight in self.weights)

    @property
    def num_products(self) -> int:
        """Multiply-adds of one row."""
        return self.shape.count * self.shape.num_outputs * self.shape.num_inputs


def least_seconds(
    cases: list["Case"], budget_seconds: float, clock: Callable[[], float]
) -> list[float]:
    """The least time of each case over at least three passes of the whole model."""
    times: list[list[float]] = [[] for _ in cases]
    end = time.perf_counter() + budget_seconds
    while len(times[0]) < 4 or time.perf_counter() < end:
        for case, seconds in zip(cases, times, strict=True):
            begin = clock()
            case.team.run(case.words)
            seconds.append(clock() - begin)
    return [min(seconds[1:]) for seconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", default="q4_1", choices=get_args(FormatName))
    parser.add_argument("--level", default="amx", choices=list(LEVELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,512")
    parser.add_argument("--activations", default="int8", choices=["int8", "fp32"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--cache", type=Path, default=Path(gettempdir()) / "headway-bench")
    options = parser.parse_args()
    library = Library(build(options.level, options.cache), options.level)
    team = Team(library, options.threads)
    quantised = options.activations == "int8" and FORMATS[options.format].scale_bytes > 0
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    cases = [Case(team, shape, options.format, 1, quantised) for shape in SHAPES]
    print(f"{options.format} {options.level} threads={options.threads} int8={quantised}")
    print("rows  " + "".join(f"{case.shape.name:>24}" for case in cases) + f"{'model':>24}")
    print("      " + "      us    GB/s  GMAC/s  " * (len(cases) + 1))
    for num_rows in map(int, options.rows.split(",")):
        line, total_seconds, total_bytes, total_products = f"{num_rows:4}  ", 0.0, 0, 0
        for case in cases:
            case.set_rows(num_rows, quantised)
        least = least_seconds(cases, options.seconds, clock)
        for case, seconds in zip(cases, least, strict=True):
            line += figures(seconds, case.num_bytes, case.num_products * num_rows)
            total_seconds += seconds
            total_bytes += case.num_bytes
            total_products += case.num_products * num_rows
        print(line + figures(total_seconds, total_bytes, total_products), flush=True)
    team.close()


def figures(seconds: float, num_bytes: int, num_products: int) -> str:
    """us, GB/s and GMAC/s in columns."""
    rates = f"{num_bytes / seconds / 1e9:8.1f}{num_products / seconds / 1e9:8.1f}"
    return f"{seconds * 1e6:8.0f}{rates}"


if __name__ == "__main__":
    main()
