"""Noise is a pure function of (seed, position, token), finite, and as good as independent draws."""

import math

import pytest
import torch
from scipy import stats

from headway.engine.noise import gumbel, gumbel_at, row_key

CPU = torch.device("cpu")
WORD = (1 << 32) - 1


def reference(seed: int, position: int, token_id: int) -> float:
    """The recipe of the docstring, in Python's integers and double precision."""
    key = row_key(seed, position)
    x = (token_id * (key >> 32 | 1) ^ key) & WORD
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    x ^= x >> 16
    return -math.log(-math.log1p(-min((x + 0.5) * 2.0**-32, 1 - 2.0**-24)))


def uniform(seeds: list[int], positions: list[int], vocab_size: int) -> torch.Tensor:
    """Noise taken back to the uniform law by the Gumbel distribution function, [R, V]."""
    return gumbel(seeds, positions, vocab_size, CPU).double().neg().exp().neg().exp()


def chi_square_p(values: torch.Tensor, num_bins: int) -> float:
    counts = torch.histc(values.flatten(), num_bins, 0, 1)
    return float(stats.chisquare(counts.numpy()).pvalue)


def test_worked_example() -> None:
    assert row_key(7, 3) == 0x9AAF21D8296E1E3D
    assert gumbel([7], [3], 6, CPU)[0, 5].item() == pytest.approx(-0.0405003, abs=1e-7)


@pytest.mark.parametrize("seed", [0, 1, 7, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 131_071])
def test_recipe(seed: int, position: int) -> None:
    ids = [0, 1, 2, 77, 49_151, 262_143]
    noise = gumbel_at(seed, position, torch.tensor(ids))
    expected = [reference(seed, position, token_id) for token_id in ids]
    assert noise.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 7, 257, 1003])
def test_a_row_does_not_depend_on_its_neighbours(vocab_size: int) -> None:
    seeds, positions = [3, 3, 9, 2**64 - 1, 0], [0, 1, 1, 40, 0]
    together = gumbel(seeds, positions, vocab_size, CPU)
    for row, seed, position in zip(together, seeds, positions, strict=True):
        assert torch.equal(row, gumbel([seed], [position], vocab_size, CPU)[0])


def test_candidates_get_the_noise_of_the_whole_vocabulary() -> None:
    whole = gumbel([11], [29], 5003, CPU)[0]
    ids = torch.arange(2, 5003, 7)
    assert torch.equal(gumbel_at(11, 29, ids), whole[ids])


def test_extremes_are_finite_and_tails_are_right() -> None:
    noise = gumbel([5, 6, 7, 8], [0, 1, 2, 3], 500_000, CPU)
    assert noise.isfinite().all()
    for bound in (5.0, 8.0, 11.0):  # P(G > b) = 1 - exp(-exp(-b)); 4 standard deviations
        expected = -math.expm1(-math.exp(-bound)) * noise.numel()
        assert abs(int((noise > bound).sum()) - expected) < 4 * math.sqrt(expected)
    assert len(noise[0].unique()) > 490_000, "float32 merges a few, the hash none"


@pytest.mark.parametrize(
    ("seeds", "positions", "vocab_size"),
    [
        pytest.param([0], [0], 400_000, id="tokens"),
        pytest.param([1] * 4000, list(range(4000)), 100, id="positions"),
        pytest.param(list(range(4000)), [17] * 4000, 100, id="consecutive seeds"),
        pytest.param(
            [1 << bit for bit in range(64)] * 60, sorted([*range(60)] * 64), 100, id="bits"
        ),
        pytest.param(list(range(4000)), list(range(4000, 0, -1)), 100, id="seed plus position"),
    ],
)
def test_uniform_along_every_direction(
    seeds: list[int], positions: list[int], vocab_size: int
) -> None:
    values = uniform(seeds, positions, vocab_size)
    assert chi_square_p(values, 257) > 1e-3
    low_bits = values * 2**16 % 1  # what the coarse bins do not see
    assert chi_square_p(low_bits, 64) > 1e-3


def test_no_token_or_position_is_favoured() -> None:
    values = uniform([4] * 2000, list(range(2000)), 300)
    for sums in (values.sum(0), values.sum(1)):
        num = values.numel() // len(sums)
        scores = (sums - num / 2) / math.sqrt(num / 12)
        assert stats.kstest(scores.numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("lag", [1, 2, 128])
def test_neighbours_are_independent(lag: int) -> None:
    """Pairs of tokens, of positions and of seeds fill the unit square evenly."""
    by_position = uniform([8] * 600, list(range(600)), 300)
    by_seed = uniform(list(range(600)), [8] * 600, 300)
    for first, second in (
        (by_position[:, :-lag], by_position[:, lag:]),
        (by_position[:-lag], by_position[lag:]),
        (by_seed[:-lag], by_seed[lag:]),
    ):
        cells = (first * 16).long() * 16 + (second * 16).long()
        counts = torch.bincount(cells.flatten(), minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3
        correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
        assert abs(correlation.item()) < 4.5 / math.sqrt(first.numel())


def test_the_winner_of_a_row_is_uniform_and_unrelated_to_the_row_before() -> None:
    winners = gumbel([21] * 20_000, list(range(20_000)), 16, CPU).argmax(-1)
    pairs = torch.bincount(winners[:-1] * 16 + winners[1:], minlength=256)
    assert stats.chisquare(torch.bincount(winners, minlength=16).numpy()).pvalue > 1e-3
    assert stats.chisquare(pairs.numpy()).pvalue > 1e-3
