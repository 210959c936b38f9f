"""The cost policies of NVIDIA's Dynamo."""

from random import Random

import numpy as np

from router.scheduler._cost_kernel import dynamo_1_0, dynamo_1_6
from router.scheduler.pick import pick
from router.scheduler.selector import Policy
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import FloatArray, TermTable
from router.sequence.rank_table import HELD_BLOCKS


class Dynamo10(Policy):
    """Dynamo 1.0.2: prefill against decode, in blocks. Equal costs go to the smallest cache."""

    __slots__ = ()
    name = "dynamo-1.0"

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """See `_cost_kernel.dynamo_1_0`."""
        costs = np.empty(len(table))
        dynamo_1_0(table.values, table.isl_tokens, settings.prefill_load_scale, costs)
        return costs

    def pick(
        self, costs: FloatArray, table: TermTable, settings: PolicySettings, rng: Random
    ) -> int:
        """The cheapest, of those the smallest cache, or by temperature."""
        return pick(costs, settings.router_temperature, rng, table.column(HELD_BLOCKS))


class Dynamo16(Policy):
    """Dynamo 1.6.1: with credits for every tier, decay, and active requests."""

    __slots__ = ()
    name = "dynamo-1.6"

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """See `_cost_kernel.dynamo_1_6`."""
        costs = np.empty(len(table))
        dynamo_1_6(
            table.values,
            table.isl_tokens,
            settings.track_prefill_tokens,
            settings.prefill_load_scale,
            settings.overlap_score_credit,
            settings.overlap_score_credit_decay,
            settings.host_cache_hit_weight,
            settings.disk_cache_hit_weight,
            settings.shared_cache_multiplier,
            settings.decode_active_request_weight,
            costs,
        )
        return costs
