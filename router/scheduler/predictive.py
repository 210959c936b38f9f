"""Places a request where it costs the least time, its own and that of others."""

import math
from random import Random

import numpy as np

from router.scheduler._predictive_kernel import COST_S, PARTS, predictive
from router.scheduler.pick import pick
from router.scheduler.selector import Policy
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import FloatArray, TermTable
from router.sequence.rank_table import RELATIVE_ERROR


class Predictive(Policy):
    """Predicted seconds, from rates learned online; see the README for the formula.

    Among candidates within one standard error of the best it chooses at random: so several routers
    that know the same do not all run to the same rank.
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
        if settings.router_temperature > 0:
            return pick(costs, settings.router_temperature, rng)
        best = int(costs.argmin())
        error = table.values[best, RELATIVE_ERROR]
        equals = np.flatnonzero(costs <= costs[best] * (1.0 + error))
        return int(equals[rng.randrange(len(equals))]) if len(equals) > 1 else best


def predicted_parts(table: TermTable, settings: PolicySettings) -> FloatArray:
    """What each candidate's cost is made of; columns as `_predictive_kernel` names them."""
    parts = np.empty((len(table), PARTS))
    expected = table.expected_output_tokens
    predictive(
        table.values,
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
