"""Policies that weigh caches against load without Dynamo's weights."""

from random import Random

import numpy as np

from router.scheduler._cost_kernel import active_requests, cache_aware, lmetric
from router.scheduler.pick import pick
from router.scheduler.selector import Choice, Policy
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import FloatArray, TermTable
from router.sequence.rank_table import HELD_BLOCKS


class CacheAware:
    """SGLang's: the best match while load is even and the match is good, else the least loaded.

    Uneven: the busiest rank has more than `balance_abs` requests more than the idlest and more than
    `balance_rel` times as many. Good: more than the fraction `cache_threshold` of the prompt.
    Equal matches go to fewer requests, then to the smaller cache; equal loads to the smaller cache.
    """

    __slots__ = ("_balance_abs", "_balance_rel", "_cache_threshold")
    name = "cache-aware"

    def __init__(
        self, balance_abs: float = 64.0, balance_rel: float = 1.5, cache_threshold: float = 0.3
    ) -> None:
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._cache_threshold = cache_threshold

    def choose(self, table: TermTable, settings: PolicySettings, rng: Random) -> Choice:
        """See the class; costs are fractions of the prompt to compute, or requests."""
        costs = np.empty(len(table))
        follows_cache = cache_aware(
            table.values,
            table.isl_tokens,
            self._balance_abs,
            self._balance_rel,
            self._cache_threshold,
            costs,
        )
        tie_breakers = [table.column(HELD_BLOCKS)]
        if follows_cache:
            load = np.empty(len(table))
            active_requests(table.values, load)
            tie_breakers.insert(0, load)
        index = pick(costs, settings.router_temperature, rng, *tie_breakers)
        return Choice(index, table, costs, self.name)


class LMetric(Policy):
    """Prefill tokens to compute · batch size: no weight at all."""

    __slots__ = ()
    name = "lmetric"

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:  # noqa: ARG002
        """See `_cost_kernel.lmetric`."""
        costs = np.empty(len(table))
        lmetric(table.values, table.isl_tokens, costs)
        return costs
