"""StepTimes: how long a pass of the model takes on n rows, measured at start and kept up to date.

Knows rows and seconds; not what the rows are, nor who asks.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows that are timed at start and shown in metrics."""

_ROUTE = (1, 2, 4, 8, 16, 32, 64, 3, 6, 12, 24, 48)
"""The order of timing them: what comes first is known where time runs out."""

_LEVEL_RATE = 0.15
_SHAPE_RATE = 0.03
_NUDGE_RATE = 0.1
_LARGEST_ERROR = 0.25
_NUM_FIRST_VISITS = 3.0
_FIRST_ERROR = 0.7
_MOST_WEIGHT = 32.0
_NOTES_PER_FIT = 8
"""The fit costs 30 us, and a pass moves its shape by less than 1 %."""


class StepTimes:
    """T(n) = level * shape(n), in seconds.

    `level` follows the machine, which others use too; `shape` is how n rows compare with one. A pass
    over as many rows as the one before tells of the machine alone; one over more or fewer tells of the
    shape, too. Errors are logarithms and cut off: a step that took ten times as long moves T by 4 %
    and T(n) against the others by 1 %. Sizes that were never run lie on a line between their
    neighbours, or beyond them in proportion to 15 + n. More rows never take less time: the shape is
    the monotone fit of what was measured (pool adjacent violators; Barlow et al., "Statistical
    Inference under Order Restrictions", 1972).

    Example, measured 5 ms at 1 row, 9 ms at 6 and 8 ms at 8: 6 and 8 rows are pooled to 8.5 ms, so
    T(2) = 5 + 3.5 / 5 = 5.7 ms and T(16) = 8.5 * (15 + 16) / (15 + 8) = 11.5 ms.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self._level = 1.0
        self._shape: dict[int, float] = dict(measured or {})
        self._visits: dict[int, float] = dict.fromkeys(self._shape, _NUM_FIRST_VISITS)
        self._num_notes = 0
        self._last_rows = 0
        self._fit = _monotone(self._shape, self._visits)

    def seconds(self, num_rows: int) -> float:
        """Estimate T(num_rows); before anything was measured, what one row takes is 10 ms."""
        sizes, shape = self._fit
        if not sizes:
            return 0.01 * _prior(num_rows, 1)
        right = bisect_left(sizes, num_rows)
        if right < len(sizes) and sizes[right] == num_rows:
            return self._level * shape[right]
        if right in (0, len(sizes)):
            near = max(0, right - 1)
            return self._level * shape[near] * _prior(num_rows, sizes[near])
        share = (num_rows - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return self._level * (shape[right - 1] + share * (shape[right] - shape[right - 1]))

    def table(self) -> tuple[tuple[int, float], ...]:
        """T(n) at SIZES; any thread may ask."""
        return tuple((num_rows, self.seconds(num_rows)) for num_rows in SIZES)

    def measure(
        self,
        run: Callable[[int], object],
        max_rows: int,
        limit_seconds: float = 0.3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Time `run(n)` for the sizes up to max_rows that `limit_seconds` have room for, twice if so.

        One pass is timed in any case. Of two times the shorter counts: a machine is never too fast.
        """
        deadline = clock() + limit_seconds
        for num_rows in (size for size in _ROUTE + _ROUTE if size <= max_rows):
            started = clock()
            if self._shape and started + self.seconds(num_rows) > deadline:
                continue
            run(num_rows)
            seconds = clock() - started
            self._shape[num_rows] = min(seconds, self._shape.get(num_rows, seconds))
            self._visits[num_rows] = _NUM_FIRST_VISITS
            self._fit = _monotone(self._shape, self._visits)

    def note(self, num_rows: int, seconds: float) -> None:
        """Learn from a pass that was run."""
        expected = self.seconds(num_rows) if self._shape else seconds
        error = math.log(max(seconds, 1e-9) / expected)
        visits = self._visits.get(num_rows, 0.0)
        old = self._shape.get(num_rows, expected / self._level)
        if visits < _NUM_FIRST_VISITS:
            step = _clip(error, _FIRST_ERROR) / (visits + 1)
        else:
            self._level *= math.exp(_LEVEL_RATE * _clip(error, _LARGEST_ERROR))
            is_another = num_rows != self._last_rows
            step = _SHAPE_RATE * _clip(error, _LARGEST_ERROR) if is_another else 0.0
        self._last_rows = num_rows
        self._shape[num_rows] = old * math.exp(step)
        self._visits[num_rows] = min(visits + 1, _MOST_WEIGHT)
        self._num_notes += 1
        if visits < _NUM_FIRST_VISITS or self._num_notes % _NOTES_PER_FIT == 0:
            self._fit = _monotone(self._shape, self._visits)


def nudge(typical: float, seconds: float) -> float:
    """Move a typical time towards a new one, which may be an outlier."""
    if typical <= 0.0:
        return seconds
    error = math.log(max(seconds, 1e-9) / typical)
    return typical * math.exp(_NUDGE_RATE * _clip(error, 1.0))


def _clip(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))


def _prior(num_rows: int, known_rows: int) -> float:
    """How many rows compare with others where nothing was measured: reading weights is most of it."""
    return (15 + num_rows) / (15 + known_rows)


def _monotone(
    values: Mapping[int, float], weights: Mapping[int, float]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Fit values that never fall as their keys grow: the keys in order, and the fit."""
    sizes = tuple(sorted(values))
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many keys
    for size in sizes:
        mean, weight, count = values[size], weights[size], 1
        while pools and pools[-1][0] >= mean:
            other, other_weight, other_count = pools.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight += other_weight
            count += other_count
        pools.append((mean, weight, count))
    return sizes, tuple(mean for mean, _, count in pools for _ in range(count))
