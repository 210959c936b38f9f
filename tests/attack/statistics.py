"""Tests of whether what an attacker observes depends on a lot, in numpy alone.

An observation is made under a lot: 1, the victim has asked the probed prompt, or 0, another one.
Without a leak both samples come from one distribution; p is the probability of a difference at
least as large as the observed one.
"""

import math
from collections import Counter

import numpy as np

SHUFFLES = 100_000
_ROWS_AT_ONCE = 2_000_000
"""Most cells of shuffled tables in memory."""


class NoPowerError(Exception):
    """Outcomes that differ in nearly every try, so that no test could find a leak in them."""


def p_of_outcomes(lots, outcomes, seed=0):
    """Return p of equal distributions of outcomes: the G-test, with its distribution by shuffling.

    The lots are dealt anew to the same outcomes; p is exact up to 1 / SHUFFLES. Raises
    NoPowerError.
    """
    values = list(Counter(outcomes))
    if len(values) == 1:
        return 1.0
    if len(values) > max(2, len(outcomes) // 4):
        raise NoPowerError(f"{len(values)} outcomes in {len(outcomes)} tries, such as {values[:3]}")
    place = {value: number for number, value in enumerate(values)}
    table = np.zeros((2, len(values)), dtype=np.int64)
    for lot, outcome in zip(lots, outcomes, strict=True):
        table[lot, place[outcome]] += 1
    totals, ones = table.sum(axis=0), int(table[1].sum())
    observed = _g(table[1][None, :], totals, ones)[0]
    rng = np.random.default_rng(seed)
    rows = max(1, _ROWS_AT_ONCE // len(values))
    as_large = done = 0
    while done < SHUFFLES:
        count = min(rows, SHUFFLES - done)
        dealt = rng.multivariate_hypergeometric(totals, ones, size=count, method="marginals")
        as_large += int((_g(dealt, totals, ones) >= observed - 1e-9).sum())
        done += count
    return (1 + as_large) / (1 + SHUFFLES)


def _g(dealt, totals, ones):
    """Return the G statistic, up to a constant of the margins, of each row of tries with lot 1."""
    return _x_log_x(dealt).sum(axis=1) + _x_log_x(totals - dealt).sum(axis=1)


def _x_log_x(counts):
    return counts * np.log(np.maximum(counts, 1))


def mann_whitney_p(first, second):
    """Return the two-sided p of the Mann-Whitney test, by its normal approximation with ties."""
    n, m = len(first), len(second)
    ranks, ties = _ranks(np.concatenate([first, second]))
    u = ranks[:n].sum() - n * (n + 1) / 2
    total = n + m
    variance = n * m / 12 * (total + 1 - float((ties**3 - ties).sum()) / (total * (total - 1)))
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def _ranks(values):
    """Return the rank of each value, equal ones sharing theirs, and the sizes of the ties."""
    _, place, ties = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(ties)
    return ((last - ties + 1 + last) / 2)[place], ties.astype(float)


def kolmogorov_smirnov_p(first, second):
    """Return the p of the two-sample Kolmogorov-Smirnov test, by its limit distribution."""
    first, second = np.sort(first), np.sort(second)
    places = np.concatenate([first, second])
    below_first = np.searchsorted(first, places, side="right") / len(first)
    below_second = np.searchsorted(second, places, side="right") / len(second)
    distance = float(np.abs(below_first - below_second).max())
    size = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    # Stephens' correction for small samples.
    x = (size + 0.12 + 0.11 / size) * distance
    if x < 0.2:  # the series does not converge there, and p is 1 up to rounding
        return 1.0
    series = sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * series))


def p_of_numbers(lots, numbers):
    """Return p of equal distributions of numbers: twice the smaller one of both tests."""
    numbers, lots = np.asarray(numbers, dtype=float), np.asarray(lots)
    first, second = numbers[lots == 0], numbers[lots == 1]
    both = mann_whitney_p(first, second), kolmogorov_smirnov_p(first, second)
    return min(1.0, 2 * min(both))
