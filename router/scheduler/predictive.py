"""Places a request where it costs the least time, its own and that of others."""

import math
from random import Random

import numpy as np
import numpy.typing as npt

from router.scheduler._claims_kernel import claim
from router.scheduler._predictive_kernel import (
    COST_S,
    DELAY_S,
    PARTS,
    PREDICTED,
    PUSHED_S,
    SLOW_START_S,
    STREAM_S,
    predictive,
)
from router.scheduler.claims import Claims
from router.scheduler.pick import pick
from router.scheduler.selector import Choice, Names, Policy
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import FloatArray, TermTable
from router.sequence.rank_table import RELATIVE_ERROR, SLOW_UNTIL_S


class Predictive(Policy):
    """Predicted seconds, from rates learned online; see the README for the formula.

    A router that has heard others chooses at random among candidates within one standard error of
    the best: so several that know the same do not all run to the same rank. In bursts that is not
    enough; there the routers take turns, see `crowd.py`.
    """

    __slots__ = ()
    name = "predictive"

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Seconds."""
        return np.ascontiguousarray(predicted_parts(table, settings)[:, COST_S])

    def pick(
        self, costs: FloatArray, table: TermTable, settings: PolicySettings, rng: Random
    ) -> int:
        """Any of the best, as far as they can be told apart; by temperature, if one is set."""
        if settings.router_temperature > 0 or table.claims is None:
            return pick(costs, settings.router_temperature, rng)
        equals = _equals(costs, table)
        return int(equals[rng.randrange(len(equals))]) if len(equals) > 1 else int(equals[0])

    def chances(self, costs: FloatArray, table: TermTable, settings: PolicySettings) -> FloatArray:
        """See `pick`."""
        if settings.router_temperature > 0:
            return super().chances(costs, table, settings)
        likely, equals = np.zeros(len(costs)), _equals(costs, table)
        likely[equals] = 1 / len(equals)
        return likely

    def parts(self, choice: Choice, settings: PolicySettings) -> tuple[Names, FloatArray]:
        """In seconds, each by what it counts for."""
        table = choice.table
        seconds = predicted_parts(table, settings)
        weights = np.ones(COST_S)
        weights[[STREAM_S, DELAY_S, PUSHED_S]] = settings.delay_weight
        own = seconds[:, :COST_S] * weights
        slow_start = np.maximum(table.column(SLOW_UNTIL_S) - table.now_s, 0.0) / SLOW_START_S
        slow = own.sum(axis=1) * slow_start
        multiplied = seconds[:, COST_S] - own.sum(axis=1) - slow
        preference = np.where(np.isclose(multiplied, 0.0, atol=1e-9), 0.0, multiplied)
        return _PARTS, np.column_stack([own, slow, preference])


_PARTS = (*PREDICTED, "slow_start_s", "preference")


def _equals(costs: FloatArray, table: TermTable) -> npt.NDArray[np.int64]:
    """Those that cannot be told from the best; where routers take turns, the first of the best.

    A router that is alone has nobody to avoid: the best, and whoever costs exactly as much.
    """
    best = costs.argmin()
    if table.claims:
        return np.array([best])
    error = 0.0 if table.claims is None else table.values[best, RELATIVE_ERROR]
    return np.flatnonzero(costs <= costs[best] * (1.0 + error))


def predicted_parts(table: TermTable, settings: PolicySettings) -> FloatArray:
    """What each candidate's cost is made of; columns as `_predictive_kernel` names them."""
    parts = np.empty((len(table), PARTS))
    expected = table.expected_output_tokens
    predictive(
        _claimed(table, table.claims, settings) if table.claims else table.values,
        table.isl_tokens,
        math.nan if expected is None else expected,
        table.now_s,
        settings.delay_weight,
        settings.host_cache_hit_weight,
        settings.disk_cache_hit_weight,
        settings.shared_cache_multiplier,
        parts,
    )
    return parts


def _claimed(table: TermTable, claims: Claims, settings: PolicySettings) -> FloatArray:
    """The table's values with what other routers are expected to put there unseen."""
    claimed = table.values.copy()
    claim(
        table.values.copy(),
        claims.unseen(table.ranks),
        claims.turns,
        claims.tokens,
        claims.contexts,
        claims.isl_tokens,
        table.now_s,
        settings.delay_weight,
        claimed,
    )
    return claimed
