"""plan_memory: buffers that live at the same time never share a byte, and others do."""

import random

import pytest

from headway.compiler.memory import Life, lives, plan_memory
from headway.compiler.program import Buffer, Call, Place
from headway.kernels.memory import ALIGNMENT_BYTES


@pytest.mark.parametrize("seed", range(50))
def test_no_two_living_buffers_overlap(seed: int) -> None:
    rng = random.Random(seed)
    lifetimes = []
    for index in range(rng.randint(1, 40)):
        first = rng.randrange(30)
        size = ALIGNMENT_BYTES * rng.randint(1, 20)
        lifetimes.append(Life(str(index), size, first, first + rng.randrange(8)))
    offsets, total = plan_memory(lifetimes)
    for one in lifetimes:
        start = offsets[one.name]
        assert start % ALIGNMENT_BYTES == 0
        assert start + one.num_bytes <= total
        for other in lifetimes:
            apart = start + one.num_bytes <= offsets[other.name] or start >= (
                offsets[other.name] + other.num_bytes
            )
            assert one is other or apart or not one.meets(other)
    busiest = max(
        sum(life.num_bytes for life in lifetimes if life.first <= call <= life.last)
        for call in range(40)
    )
    assert busiest <= total <= 2 * busiest


def test_the_worked_example() -> None:
    calls = [
        Call("k", {"out": Place("a")}),
        Call("k", {"x": Place("a"), "out": Place("b", 8)}),
        Call("k", {"x": Place("b"), "out": Place("c")}),
        Call("k", {"x": Place("c")}),
    ]
    buffers = [Buffer(name, 100) for name in "abc"]
    offsets, total = plan_memory(lives(calls, buffers, [], {}))
    assert (offsets, total) == ({"a": 0, "b": 128, "c": 0}, 256)


def test_outputs_live_to_the_end_and_what_nobody_touches_has_no_place() -> None:
    calls = [Call("k", {"out": Place("a")}), Call("k", {"out": Place("b")})]
    buffers = [Buffer("a", 4, "T"), Buffer("b", 4), Buffer("c", 4)]
    assert lives(calls, buffers, ["a"], {"T": 100}) == [
        Life("a", 448, 0, 2),
        Life("b", 64, 1, 1),
    ]
