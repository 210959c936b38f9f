"""The default policy: least predicted time, of the request itself and of the delay to others."""

import math
from random import Random

import numpy as np
import numpy.typing as npt

from router.scheduler._herd_kernel import claim
from router.scheduler.herd import ExpectedLoad
from router.scheduler.policy._predictive_kernel import (
    COST_S,
    DELAY_S,
    PARTS,
    PREDICTED,
    PUSHED_S,
    SLOW_START_S,
    STREAM_S,
    predictive,
)
from router.scheduler.selector import Choice, Names, Policy, draw_equal, pick
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import FloatArray, TermTable
from router.sequence.rank_table import RELATIVE_ERROR, SLOW_UNTIL_S


class Predictive(Policy):
    """Predicted seconds, from rates learned online; see the README for the formula.

    If other routers exist, a router chooses at random among candidates within one standard error of
    the best, so that routers with equal knowledge do not all choose the same rank. In bursts that
    is not enough: then the routers take turns, see `herd.py`.
    """

    __slots__ = ()
    name = "predictive"

    def choose(self, table: TermTable, settings: PolicySettings, rng: Random) -> Choice:
        """Choose by the costs that came with the terms, or by those of `score`."""
        if table.costs is None:
            return super().choose(table, settings, rng)
        index = table.first
        if table.claims is not None or settings.router_temperature > 0:
            index = self.pick(table.costs, table, settings, rng)
        elif table.ties > 1:
            index = draw_equal(table.costs, index, table.ties, rng)
        return Choice(index, table, table.costs, self.name)

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Return the costs, in seconds."""
        return np.ascontiguousarray(predicted_parts(table, settings)[:, COST_S])

    def pick(
        self, costs: FloatArray, table: TermTable, settings: PolicySettings, rng: Random
    ) -> int:
        """Choose among the best, within the error of the prediction; or by temperature, if set."""
        if settings.router_temperature > 0 or table.claims is None:
            return pick(costs, settings.router_temperature, rng)
        equals = _equals(costs, table)
        return int(equals[rng.randrange(len(equals))]) if len(equals) > 1 else int(equals[0])

    def chances(self, costs: FloatArray, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Return the probability that `pick` chooses each candidate."""
        if settings.router_temperature > 0:
            return super().chances(costs, table, settings)
        likely, equals = np.zeros(len(costs)), _equals(costs, table)
        likely[equals] = 1 / len(equals)
        return likely

    def parts(self, choice: Choice, settings: PolicySettings) -> tuple[Names, FloatArray]:
        """Return the weighted parts, in seconds."""
        table = choice.table
        seconds = predicted_parts(table, settings)
        weights = np.ones(COST_S)
        weights[_LATE] = settings.delay_weight
        parts = np.empty((len(table), len(_PARTS)))
        own, slow, preference = parts[:, :COST_S], parts[:, COST_S], parts[:, COST_S + 1]
        np.multiply(seconds[:, :COST_S], weights, out=own)
        own_s = own.sum(axis=1)
        slow_start = np.maximum(table.column(SLOW_UNTIL_S) - table.now_s, 0.0) / SLOW_START_S
        np.multiply(own_s, slow_start, out=slow)
        np.subtract(seconds[:, COST_S] - own_s, slow, out=preference)
        preference[np.abs(preference) <= 1e-9] = 0.0
        return _PARTS, parts


_PARTS = (*PREDICTED, "slow_start_s", "preference")
_LATE = [STREAM_S, DELAY_S, PUSHED_S]
"""Parts that come after the first token, or concern other requests."""


def _equals(costs: FloatArray, table: TermTable) -> npt.NDArray[np.int64]:
    """Return the positions of the candidates that are as good as the best.

    Where routers take turns, only the first of the best. Without other routers, the best and those
    with exactly equal cost; otherwise all within one standard error.
    """
    best = costs.argmin()
    if table.claims:
        return np.array([best])
    error = 0.0 if table.claims is None else table.values[best, RELATIVE_ERROR]
    return np.flatnonzero(costs <= costs[best] * (1.0 + error))


def cost_weights(settings: PolicySettings) -> FloatArray:
    """Return the weights of other requests' delay, and of blocks on host, disk and remote."""
    blocks = (settings.host_cache_hit_weight, settings.disk_cache_hit_weight)
    return np.array([settings.delay_weight, *blocks, settings.shared_cache_multiplier])


def predicted_parts(table: TermTable, settings: PolicySettings) -> FloatArray:
    """Return the parts of each candidate's cost; `_predictive_kernel` names the columns."""
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


def _claimed(table: TermTable, claims: ExpectedLoad, settings: PolicySettings) -> FloatArray:
    """Return the table's values, including the expected unseen placements of other routers."""
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
