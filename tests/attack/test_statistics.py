"""The tests that judge channels: right p-values, found leaks, and no false alarms."""

import math

import numpy as np
import pytest

from attack.statistics import (
    NoPowerError,
    kolmogorov_smirnov_p,
    mann_whitney_p,
    p_of_numbers,
    p_of_outcomes,
)

ALPHA = 1e-4
"""What remains of 0.01 for each of a hundred channels."""


def lots_of(rng, tries=1000):
    return rng.integers(0, 2, tries)


def test_mann_whitney_p_is_that_of_the_normal_approximation():
    """U is 4 of 25, and its standard deviation √(25 · 11 / 12); the second with two ties."""
    p = mann_whitney_p(np.array([1, 2, 3, 5, 8]), np.array([4, 6, 7, 9, 10]))
    assert p == pytest.approx(math.erfc((8.5 - 0.5) / math.sqrt(275 / 12) / math.sqrt(2)))
    tied = mann_whitney_p(np.array([1, 2, 2, 3]), np.array([2, 3, 4, 5]))
    variance = 16 / 12 * (9 - ((27 - 3) + (8 - 2)) / (8 * 7))
    assert tied == pytest.approx(math.erfc((8 - 2.5 - 0.5) / math.sqrt(variance) / math.sqrt(2)))
    assert mann_whitney_p(np.ones(9), np.ones(8)) == 1.0


def test_kolmogorov_smirnov_p_is_that_of_the_tables():
    """1.358 and 1.628 are the limits of 5 % and 1 % for large samples."""
    count = 200_000
    even = np.arange(count) / count
    for x, p in ((1.358, 0.05), (1.628, 0.01)):
        shifted = even + x * math.sqrt(2 / count)
        assert kolmogorov_smirnov_p(even, shifted) == pytest.approx(p, rel=0.03)
    assert kolmogorov_smirnov_p(even, even) == 1.0


def test_p_of_outcomes_is_that_of_fishers_exact_test():
    """The lady tasting tea: 8 cups, one wrong of each kind; p = 34 / 70."""
    lots = [1, 1, 1, 1, 0, 0, 0, 0]
    said = ["milk", "milk", "milk", "tea", "tea", "tea", "tea", "milk"]
    assert p_of_outcomes(lots, said) == pytest.approx(34 / 70, abs=0.01)
    assert p_of_outcomes(lots, ["milk"] * 4 + ["tea"] * 4) == pytest.approx(2 / 70, abs=0.003)


def test_planted_leak_of_outcomes_is_found():
    """Also one that appears in every tenth try only."""
    rng = np.random.default_rng(1)
    for shown in (1.0, 0.1):
        lots = lots_of(rng)
        said = ["cached" if lot and rng.random() < shown else "not" for lot in lots]
        assert p_of_outcomes(lots, said) < ALPHA


def test_planted_leak_of_times_is_found():
    """A shift by a third of the spread, and a wider spread around the same median."""
    rng = np.random.default_rng(2)
    lots = lots_of(rng)
    noise = rng.lognormal(0, 0.3, len(lots))
    assert p_of_numbers(lots, noise + lots * 0.1) < ALPHA
    assert p_of_numbers(lots, rng.normal(0, 1 + lots)) < ALPHA


def test_noise_is_no_leak():
    """Of 300 channels without a leak, about 3 have a p below 0.01, and none one below 0.0001."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(300):
        lots = lots_of(rng, 400)
        found.append(p_of_numbers(lots, rng.lognormal(0, 1, 400)))
    for _ in range(30):
        lots = lots_of(rng, 400)
        found.append(p_of_outcomes(lots, rng.choice(list("aab"), 400).tolist()))
    assert sum(p < 0.01 for p in found) <= 12
    assert min(found) > ALPHA


def test_outcomes_that_always_differ_are_not_judged():
    with pytest.raises(NoPowerError):
        p_of_outcomes([0, 1] * 50, [str(number) for number in range(100)])
