"""StepTimes: what it makes of measurements, outliers, a busy machine and sizes it never saw."""

import random

import pytest

from headway.engine.step_times import SIZES, StepTimes, nudge

MEASURED = {1: 0.005, 2: 0.0052, 4: 0.006, 8: 0.012, 16: 0.022}


def test_the_docstrings_example() -> None:
    times = StepTimes({1: 5.0, 6: 9.0, 8: 8.0})
    found = [times.seconds(num_rows) for num_rows in (1, 2, 6, 8, 16)]
    assert found == pytest.approx([5.0, 5.7, 8.5, 8.5, 8.5 * 31 / 23])


def test_nothing_measured() -> None:
    times = StepTimes()
    assert times.seconds(1) == 0.01
    assert times.seconds(17) == pytest.approx(0.02)
    times.note(4, 0.1)
    assert times.seconds(4) == pytest.approx(0.1)
    assert times.seconds(1) == pytest.approx(0.1 * 16 / 19)


@pytest.mark.parametrize("seed", range(5))
def test_more_rows_never_take_less(seed: int) -> None:
    rng = random.Random(seed)
    times = StepTimes()
    for _ in range(300):
        times.note(rng.randint(1, 90), rng.uniform(0.001, 0.1))
        found = [times.seconds(num_rows) for num_rows in range(1, 200)]
        assert found == sorted(found)


def test_an_outlier_moves_little() -> None:
    times = StepTimes(MEASURED)
    times.note(4, 1.0)
    assert times.seconds(4) == pytest.approx(0.006, rel=0.055)
    for _ in range(200):
        times.note(4, 0.006)
    assert times.seconds(4) == pytest.approx(0.006, rel=0.01)
    assert times.seconds(8) == pytest.approx(0.012, rel=0.015)


def test_a_busy_machine_slows_all_sizes_alike() -> None:
    times = StepTimes(MEASURED)
    for _ in range(100):
        times.note(4, 0.012)
    assert times.seconds(4) == pytest.approx(0.012, rel=0.02)
    assert times.seconds(8) / times.seconds(4) == pytest.approx(2.0, rel=0.02)
    assert times.seconds(1) > 1.6 * 0.005


def test_a_size_that_changed_alone_is_noticed() -> None:
    times = StepTimes(MEASURED)
    for _ in range(150):
        for num_rows, seconds in ((1, 0.005), (4, 0.0105), (8, 0.012)):
            times.note(num_rows, seconds)
    assert times.seconds(4) == pytest.approx(0.0105, rel=0.05)
    assert times.seconds(1) == pytest.approx(0.005, rel=0.05)


def test_a_size_never_measured_is_learnt_in_a_few_passes() -> None:
    times = StepTimes({1: 0.06})
    for _ in range(3):
        times.note(2, 0.12)
    assert times.seconds(2) == pytest.approx(0.12, rel=0.1)
    assert times.seconds(1) == 0.06


class Machine:
    """Runs n rows in `seconds(n)` of its own clock."""

    def __init__(self, first: float, per_row: float) -> None:
        self.now, self.first, self.per_row = 100.0, first, per_row
        self.sizes: list[int] = []

    def run(self, num_rows: int) -> None:
        self.sizes.append(num_rows)
        self.now += self.first + self.per_row * num_rows

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("first", "per_row", "max_rows", "num_sizes"),
    [
        (0.001, 0.0001, 64, 12),
        (0.001, 0.0001, 20, 8),
        (0.005, 0.001, 64, 12),
        (0.06, 0.02, 64, 3),
        (2.0, 1.0, 64, 1),
    ],
)
def test_measuring_ends_in_time(
    first: float, per_row: float, max_rows: int, num_sizes: int
) -> None:
    machine, times = Machine(first, per_row), StepTimes()
    times.measure(machine.run, max_rows, clock=machine.clock)
    assert machine.now - 100.0 <= max(0.3, 1.01 * (first + per_row)) + 0.02
    measured = sorted(set(machine.sizes))
    assert len(measured) == num_sizes
    for num_rows in measured:
        assert times.seconds(num_rows) == pytest.approx(first + per_row * num_rows)
    assert [num_rows for num_rows, _ in times.table()] == list(SIZES)


def test_the_shorter_of_two_measurements_counts() -> None:
    machine, times = Machine(0.001, 0.0001), StepTimes()

    def hiccup(num_rows: int) -> None:
        machine.now += 0.02 if len(machine.sizes) == 3 else 0.0
        machine.run(num_rows)

    times.measure(hiccup, 64, clock=machine.clock)
    assert times.seconds(8) == pytest.approx(0.0018)


def test_nudge_follows_and_forgives() -> None:
    typical = nudge(0.0, 0.002)
    assert typical == 0.002
    assert nudge(typical, 1.0) < 0.0023
    for _ in range(60):
        typical = nudge(typical, 0.004)
    assert typical == pytest.approx(0.004, rel=0.02)
