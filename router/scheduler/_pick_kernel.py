"""Selection of one of several costs: the lowest, or a random draw."""

import math

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, kernel

Array = npt.NDArray[np.float64]


@kernel("Tuple((int64, int64))(float64[::1])")
def cheapest(costs: Array) -> tuple[int, int]:
    """Return the first index of the lowest cost, and the number of costs exactly equal to it."""
    best, ties = 0, 0
    for i in range(len(costs)):
        if costs[i] < costs[best]:
            best, ties = i, 1
        elif costs[i] == costs[best]:
            ties += 1
    return best, ties


@kernel("int64(float64[::1], int64, int64)")
def nth_equal(costs: Array, first: int, number: int) -> int:
    """Return the index of the n-th cost equal to the first one, which is number 0."""
    index = first
    while number:
        index += 1
        if costs[index] == costs[first]:
            number -= 1
    return index


@kernel("int64(float64[::1], float64, int64)")
def nth_within(costs: Array, most: float, number: int) -> int:
    """Return the index of the n-th cost up to a limit, from 0."""
    for i in range(len(costs)):
        if costs[i] <= most:
            if not number:
                return i
            number -= 1
    return -1


@kernel("void(float64[::1], int64, float64[::1], float64[::1])")
def keys_of_equals(costs: Array, first: int, keys: Array, kept: Array) -> None:
    """Write the keys of the costs equal to the first one, and infinity in all other places."""
    for i in range(len(costs)):
        kept[i] = keys[i] if costs[i] == costs[first] else math.inf


@device
def sums(costs: Array, temperature: float) -> Array:
    """Return running sums of exp(−cost / ((max − min) · temperature)); even steps if all are equal.

    Source: Dynamo's `softmax_sample`.
    """
    low, high = math.inf, -math.inf
    for cost in costs:
        low, high = min(low, cost), max(high, cost)
    spread = high - low if high > low else 1.0
    parts = np.empty(len(costs))
    total = 0.0
    for i in range(len(costs)):
        total += math.exp(-(costs[i] - low) / spread / temperature)
        parts[i] = total
    return parts


@kernel("int64(float64[::1], float64, float64)")
def drawn(costs: Array, temperature: float, sample: float) -> int:
    """Return the index at which `sample` (0 to 1) falls on the running sums."""
    parts = sums(costs, temperature)
    for i in range(len(costs)):
        if sample * parts[-1] < parts[i]:
            return i
    return len(costs) - 1


@kernel("void(float64[::1], float64, float64[::1])")
def softmax(costs: Array, temperature: float, chances: Array) -> None:
    """Write the probability of each cost to be drawn."""
    parts = sums(costs, temperature)
    for i in range(len(costs)):
        before = parts[i - 1] if i else 0.0
        chances[i] = (parts[i] - before) / parts[-1]
