"""plan_memory: one arena in which buffers that never live at the same time share bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headway.compiler.program import Buffer, Call
from headway.kernels.memory import ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer's size and the first and last call that touches it."""

    name: str
    num_bytes: int
    first: int
    last: int

    def meets(self, other: "Life") -> bool:
        """Whether both are alive during some call."""
        return self.first <= other.last and other.first <= self.last


def lives(
    calls: Sequence[Call],
    buffers: Iterable[Buffer],
    outputs: Iterable[str],
    max_sizes: Mapping[str, int],
) -> list[Life]:
    """When each buffer is in use; outputs live to the end."""
    touched: dict[str, tuple[int, int]] = {}
    for index, call in enumerate(calls):
        for name in call.buffers:
            touched[name] = (touched.get(name, (index, index))[0], index)
    for name in outputs:
        if name in touched:
            touched[name] = (touched[name][0], len(calls))
    return [
        Life(each.name, _num_bytes(each, max_sizes), *touched[each.name])
        for each in buffers
        if each.name in touched
    ]


def plan_memory(lifetimes: Sequence[Life]) -> tuple[dict[str, int], int]:
    """Byte offset of each buffer, and the size of the arena. Largest first, each as low as it fits.

    Example, a (100 bytes, calls 0-1), b (100, 1-2), c (100, 2-3): a and b are both alive in call 1,
    b and c in call 2; offsets a 0, b 128, c 0 and an arena of 256.
    """
    placed: list[tuple[Life, int]] = []
    for life in sorted(lifetimes, key=lambda each: (-each.num_bytes, each.first, each.name)):
        offset = 0
        for other, start in sorted(placed, key=lambda pair: pair[1]):
            if life.meets(other) and offset + life.num_bytes > start:
                offset = max(offset, start + other.num_bytes)
        placed.append((life, offset))
    size = max((offset + life.num_bytes for life, offset in placed), default=0)
    return {life.name: offset for life, offset in placed}, size


def _num_bytes(buffer: Buffer, max_sizes: Mapping[str, int]) -> int:
    rows = max_sizes[buffer.rows] if isinstance(buffer.rows, str) else buffer.rows
    num_bytes = -(-rows // buffer.group) * buffer.group * buffer.row_bytes
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
