"""Policies that ignore caches."""

from bisect import bisect_right
from random import Random

import numpy as np

from router.protocol.values import Rank, Scope
from router.scheduler.policy._cost_kernel import active_requests
from router.scheduler.selector import Choice, Names, Policy, chances, pick
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import NO_PARTS, FloatArray, TermTable

MAX_SCOPES = 4_096
"""Limit of rotations kept, one per scope; beyond it the oldest one is reset."""


class RoundRobin(Policy):
    """The candidate after the last chosen one, in order of ranks; a rotation per scope."""

    __slots__ = ("_last",)
    name = "round-robin"
    uses = ("router_temperature",)

    def __init__(self) -> None:
        self._last: dict[Scope, Rank] = {}

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:  # noqa: ARG002
        """Return the number of turns until each candidate's turn."""
        last, count = self._last.get(table.scope), len(table)
        begin = 0 if last is None else bisect_right(table.ranks, last)
        return (np.arange(count, dtype=np.float64) - begin) % count

    def pick(
        self, costs: FloatArray, table: TermTable, settings: PolicySettings, rng: Random
    ) -> int:
        """Choose the next candidate, and advance the rotation."""
        index = pick(costs, settings.router_temperature, rng)
        if table.scope not in self._last and len(self._last) >= MAX_SCOPES:
            del self._last[next(iter(self._last))]
        self._last[table.scope] = table.ranks[index]
        return index


class Uniform(Policy):
    """A uniformly random candidate."""

    __slots__ = ()
    name = "random"
    uses = ()  # at any temperature equal costs are equally likely

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:  # noqa: ARG002
        """Return equal costs."""
        return np.zeros(len(table))


class LeastLoaded(Policy):
    """The candidate with the fewest requests."""

    __slots__ = ()
    name = "least-loaded"
    uses = ("router_temperature",)

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:  # noqa: ARG002
        """Return the number of requests on each candidate."""
        return _requests(table, NO_PARTS)

    def parts(self, choice: Choice, settings: PolicySettings) -> tuple[Names, FloatArray]:  # noqa: ARG002
        """Return the requests booked by this router, and those of others."""
        parts = np.empty((len(choice.table), len(_PARTS)))
        _requests(choice.table, parts)
        return _PARTS, parts


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
        """Choose the cheaper of two drawn candidates, or by temperature; the first if equal."""
        first = rng.randrange(len(costs))
        if len(costs) == 1:
            return first
        second = rng.randrange(len(costs) - 1)
        drawn = np.array([first, second + (second >= first)])
        return int(drawn[pick(costs[drawn], settings.router_temperature, rng)])

    def chances(
        self,
        costs: FloatArray,
        table: TermTable,  # noqa: ARG002
        settings: PolicySettings,
    ) -> FloatArray:
        """Return the chance of each candidate, over all equally likely pairs."""
        if len(costs) == 1:
            return np.ones(1)
        of_two = chances(np.array([0.0, 1.0]), settings.router_temperature)
        dearer = (costs[:, None] < costs).sum(axis=1)
        cheaper = (costs[:, None] > costs).sum(axis=1)
        equal = len(costs) - 1 - dearer - cheaper
        wins = of_two[0] * dearer + of_two[1] * cheaper + 0.5 * equal
        return np.asarray(wins / wins.sum())


_PARTS = ("requests", "foreign_requests", "unused", "preference")


def _requests(table: TermTable, parts: FloatArray) -> FloatArray:
    costs = np.empty(len(table))
    active_requests(table.values, costs, parts)
    return costs
