"""Numbers of workers for a demand, in requests per second."""

import math

import numpy as np

from router.scheduler.terms import FloatArray

_ROUNDING = 1e-9
"""Tolerance of comparisons, so that a demand of exactly n workers needs n."""


def spare_workers(requests_per_s: float, most: FloatArray, target: float) -> int:
    """Return how many workers could go, whichever they are, with saturation at most `target`.

    `most`: the requests per second that each worker can serve. O(workers · log workers).
    """
    left = np.cumsum(np.sort(most))  # of the slowest 1, 2, … workers
    enough = target * left >= requests_per_s * (1.0 - _ROUNDING)
    if requests_per_s <= 0:
        return len(most)
    return int(enough.sum()) - 1 if enough.any() else 0


def lacking_workers(requests_per_s: float, most: FloatArray, target: float) -> int:
    """Return how many more workers, like the mean of these, bring saturation to `target`."""
    lacking = requests_per_s / target - float(most.sum())
    mean = float(most.mean())
    return max(math.ceil(lacking / mean - _ROUNDING), 0)
