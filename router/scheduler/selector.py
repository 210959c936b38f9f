"""From costs to a choice."""

import math
from collections.abc import Sequence
from random import Random

from router.scheduler.cost import Terms


def select(costs: Sequence[float], terms: Sequence[Terms], temperature: float, rng: Random) -> int:
    """Index of the chosen candidate; neither sequence may be empty.

    At temperature 0 the cheapest; among exactly equal costs the smallest cache, and among equal
    caches a uniformly random one. Above 0 a draw with p ∝ exp(−cost / ((max − min) ·
    temperature)), uniform where all costs are equal. Source: Dynamo 1.0.2,
    `DefaultWorkerSelector`, `softmax_sample`.
    """
    if temperature > 0:
        return rng.choices(range(len(costs)), weights=_softmax(costs, temperature))[0]
    keys = [(cost, term.held_blocks) for cost, term in zip(costs, terms, strict=True)]
    best = min(keys)
    return rng.choice([index for index, key in enumerate(keys) if key == best])


def _softmax(costs: Sequence[float], temperature: float) -> list[float]:
    low = min(costs)
    spread = max(costs) - low
    if spread == 0:
        return [1.0] * len(costs)
    return [math.exp(-(cost - low) / spread / temperature) for cost in costs]
