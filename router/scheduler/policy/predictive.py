"""The default policy: least predicted time, of the request itself and of the delay to others."""

import math
from random import Random
from typing import TypeAlias

import numpy as np

from router.scheduler._pick_kernel import nth_within
from router.scheduler.policy._predicted_parts import PARTS, PREDICTED
from router.scheduler.policy._predictive_kernel import price, weigh_parts
from router.scheduler.selector import Choice, Names, Policy, pick
from router.scheduler.settings import OBJECTIVES, PolicySettings
from router.scheduler.terms import NO_PARTS, FloatArray, TermTable


class Predictive(Policy):
    """Predicted seconds, from rates learned online; see the README for the formula.

    If other routers exist, a router chooses at random among candidates within one standard error of
    the best, so that routers with equal knowledge do not all choose the same rank. In bursts that
    is not enough: then the routers take turns, see `herd.py`.
    """

    __slots__ = ()
    name = "predictive"
    uses = (
        "router_temperature",
        "host_cache_hit_weight",
        "disk_cache_hit_weight",
        "shared_cache_multiplier",
        "delay_weight",
        "trust_weights",
        *OBJECTIVES,
    )

    def choose(self, table: TermTable, settings: PolicySettings, rng: Random) -> Choice:
        """Choose by the costs, which usually come with the terms."""
        costs, index, ties, most = _priced(table, settings)
        if settings.router_temperature > 0:
            index = pick(costs, settings.router_temperature, rng)
        elif ties > 1:
            index = nth_within(costs, most, rng.randrange(ties))
        return Choice(index, table, costs, self.name)

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Return the costs, in seconds."""
        return _priced(table, settings)[0]

    def chances(self, costs: FloatArray, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Return the probability that `choose` chooses each candidate."""
        if settings.router_temperature > 0:
            return super().chances(costs, table, settings)
        likely, (_, first, ties, most) = np.zeros(len(costs)), _priced(table, settings)
        likely[first if ties == 1 else costs <= most] = 1 / ties
        return likely

    def parts(self, choice: Choice, settings: PolicySettings) -> tuple[Names, FloatArray]:
        """Return the weighted parts, in seconds."""
        table = choice.table
        seconds, parts = predicted_parts(table, settings), np.empty((len(table), len(_PARTS)))
        weigh_parts(table.values, seconds, table.now_s, settings.delay_weight, parts)
        return _PARTS, parts


Priced: TypeAlias = tuple[FloatArray, int, int, float]
"""The costs, the first of the cheapest, how many are as good, and their highest cost."""

_PARTS = (*PREDICTED, "slow_start_s", "preference", "trial_s")


def _priced(table: TermTable, settings: PolicySettings) -> Priced:
    if table.costs is not None:
        return table.costs, table.first, table.ties, table.most
    return _price(table, settings, NO_PARTS)


def cost_weights(
    settings: PolicySettings, most_ttft_s: float = math.inf, most_tpot_s: float = math.inf
) -> FloatArray:
    """Return the weights and objectives that the kernel `price` reads."""
    blocks = (settings.host_cache_hit_weight, settings.disk_cache_hit_weight)
    weights = (settings.delay_weight, *blocks, settings.shared_cache_multiplier)
    return np.array([*weights, most_ttft_s, most_tpot_s])


def predicted_parts(table: TermTable, settings: PolicySettings) -> FloatArray:
    """Return the parts of each candidate's cost; `_predicted_parts` names the columns."""
    parts = np.empty((len(table), PARTS))
    _price(table, settings, parts)
    return parts


def _price(table: TermTable, settings: PolicySettings, parts: FloatArray) -> Priced:
    """Price the candidates, and write their parts to the rows of `parts`."""
    costs, expected = np.empty(len(table)), table.expected_output_tokens
    first, ties, most = price(
        table.values,
        table.slots,
        table.isl_tokens,
        math.nan if expected is None else expected,
        table.now_s,
        cost_weights(settings, table.most_ttft_s, table.most_tpot_s),
        table.claims.estimate,
        table.claims.ours,
        parts,
        costs,
    )
    return costs, first, ties, most
