"""Policies that balance cache hits against load without Dynamo's weights."""

from random import Random

import numpy as np

from router.scheduler.policy._cost_kernel import active_requests, cache_aware, lmetric
from router.scheduler.selector import Choice, Names, Policy, Reasons, chances, pick
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import NO_PARTS, FloatArray, TermTable
from router.sequence.rank_table import HELD_BLOCKS

_CACHE_PARTS = ("uncached_fraction", "requests", "unused", "preference")
_LMETRIC_PARTS = ("queued_token_requests", "own_token_requests", "unused", "preference")


class CacheAware:
    """SGLang's policy: best match if load is even and the match good, else fewest requests.

    Uneven: the busiest rank has more than `balance_abs` requests more than the idlest and more than
    `balance_rel` times as many. Good: more than the fraction `cache_threshold` of the prompt. Equal
    matches are decided by fewer requests, then by the smaller cache; equal loads by the smaller
    cache.
    """

    __slots__ = ("_balance_abs", "_balance_rel", "_cache_threshold")
    name = "cache-aware"
    uses = ("router_temperature",)

    def __init__(
        self, balance_abs: float = 64.0, balance_rel: float = 1.5, cache_threshold: float = 0.3
    ) -> None:
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._cache_threshold = cache_threshold

    def choose(self, table: TermTable, settings: PolicySettings, rng: Random) -> Choice:
        """Choose as the class describes; costs are uncached fractions of prompts, or requests."""
        costs, keys = self._score(table, NO_PARTS)
        return Choice(pick(costs, settings.router_temperature, rng, *keys), table, costs, self.name)

    def explain(self, choice: Choice, settings: PolicySettings) -> Reasons:
        """Return the `Reasons`, in fractions of the prompt, or in requests."""
        parts = np.empty((len(choice.table), len(_CACHE_PARTS)))
        costs, keys = self._score(choice.table, parts)
        return Reasons(_CACHE_PARTS, parts, chances(costs, settings.router_temperature, *keys))

    def _score(
        self, table: TermTable, parts: FloatArray
    ) -> tuple[FloatArray, tuple[FloatArray, ...]]:
        """Return the costs and the tie breakers."""
        costs, held_blocks = np.empty(len(table)), table.column(HELD_BLOCKS)
        follows_cache = cache_aware(
            table.values,
            table.isl_tokens,
            self._balance_abs,
            self._balance_rel,
            self._cache_threshold,
            costs,
            parts,
        )
        if not follows_cache:
            return costs, (held_blocks,)
        load = np.empty(len(table))
        active_requests(table.values, load, NO_PARTS)
        return costs, (load, held_blocks)


class LMetric(Policy):
    """Prefill tokens to compute · batch size: a policy without weights."""

    __slots__ = ()
    name = "lmetric"
    uses = ("router_temperature",)

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:  # noqa: ARG002
        """Return the costs of `_cost_kernel.lmetric`."""
        return self._score(table, NO_PARTS)

    def parts(self, choice: Choice, settings: PolicySettings) -> tuple[Names, FloatArray]:  # noqa: ARG002
        """Return the parts in tokens · requests: of booked tokens, and of this prompt's."""
        parts = np.empty((len(choice.table), len(_LMETRIC_PARTS)))
        self._score(choice.table, parts)
        return _LMETRIC_PARTS, parts

    def _score(self, table: TermTable, parts: FloatArray) -> FloatArray:
        costs = np.empty(len(table))
        lmetric(table.values, table.isl_tokens, costs, parts)
        return costs
