"""From costs to a choice."""

from random import Random

import numpy as np

from router.scheduler._pick_kernel import cheapest, drawn, keys_of_equals, nth_equal, softmax
from router.scheduler.terms import FloatArray


def pick(costs: FloatArray, temperature: float, rng: Random, *tie_breakers: FloatArray) -> int:
    """Index of the chosen candidate; costs are finite, and there is at least one.

    At temperature 0 the cheapest; exactly equal costs go to the lowest of the first tie breaker,
    those that are still equal to that of the next, and in the end to a uniformly random one. Above
    0 a draw with p ∝ exp(−cost / ((max − min) · temperature)), uniform where all costs are equal.
    """
    if temperature > 0:
        return drawn(costs, temperature, rng.random())
    first, ties = cheapest(costs)
    if ties == 1:
        return first
    if tie_breakers:
        kept = np.empty(len(costs))
        keys_of_equals(costs, first, np.ascontiguousarray(tie_breakers[0]), kept)
        return pick(kept, 0.0, rng, *tie_breakers[1:])
    return nth_equal(costs, first, rng.randrange(ties))


def chances(costs: FloatArray, temperature: float, *tie_breakers: FloatArray) -> FloatArray:
    """How likely `pick` is to choose each candidate, by the same rules."""
    if temperature > 0:
        drawn_from = np.empty(len(costs))
        softmax(np.ascontiguousarray(costs), temperature, drawn_from)
        return drawn_from
    best = costs == costs.min()
    for keys in tie_breakers:
        best &= keys == keys[best].min()
    likely: FloatArray = best / best.sum()
    return likely
