"""Policies that do not look at caches."""

from bisect import bisect_right
from random import Random

import numpy as np

from router.protocol.values import Rank, Scope
from router.scheduler._cost_kernel import active_requests
from router.scheduler.pick import pick
from router.scheduler.selector import Policy
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import FloatArray, TermTable

MAX_SCOPES = 4_096
"""Rotations kept; beyond, the one begun first is begun anew."""


class RoundRobin(Policy):
    """The next rank in order behind the last one chosen, per scope, whoever may be chosen."""

    __slots__ = ("_last",)
    name = "round-robin"

    def __init__(self) -> None:
        self._last: dict[Scope, Rank] = {}

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:  # noqa: ARG002
        """How many turns each has to wait."""
        last, count = self._last.get(table.scope), len(table)
        begin = 0 if last is None else bisect_right(table.ranks, last)
        return (np.arange(count, dtype=np.float64) - begin) % count

    def pick(
        self, costs: FloatArray, table: TermTable, settings: PolicySettings, rng: Random
    ) -> int:
        """Whose turn it is, which is then over."""
        index = pick(costs, settings.router_temperature, rng)
        if table.scope not in self._last and len(self._last) >= MAX_SCOPES:
            del self._last[next(iter(self._last))]
        self._last[table.scope] = table.ranks[index]
        return index


class Uniform(Policy):
    """A uniformly random candidate."""

    __slots__ = ()
    name = "random"

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:  # noqa: ARG002
        """The same for everybody."""
        return np.zeros(len(table))


class LeastLoaded(Policy):
    """The candidate with the fewest requests."""

    __slots__ = ()
    name = "least-loaded"

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:  # noqa: ARG002
        """Requests there."""
        costs = np.empty(len(table))
        active_requests(table.values, costs)
        return costs


class PowerOfTwo(LeastLoaded):
    """The less loaded one of two different candidates drawn at random."""

    __slots__ = ()
    name = "power-of-two"

    def pick(
        self,
        costs: FloatArray,
        table: TermTable,  # noqa: ARG002
        settings: PolicySettings,
        rng: Random,
    ) -> int:
        """The first drawn where both are equal; by temperature among the two."""
        first = rng.randrange(len(costs))
        if len(costs) == 1:
            return first
        second = rng.randrange(len(costs) - 1)
        drawn = np.array([first, second + (second >= first)])
        return int(drawn[pick(costs[drawn], settings.router_temperature, rng)])
