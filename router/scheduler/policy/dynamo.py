"""The cost policies of NVIDIA's Dynamo."""

import numpy as np

from router.scheduler.policy._cost_kernel import dynamo_1_0, dynamo_1_6
from router.scheduler.selector import Choice, Names, Policy
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import NO_PARTS, FloatArray, TermTable
from router.sequence.rank_table import HELD_BLOCKS

_PARTS = ("prefill_blocks", "decode_blocks", "active_request_blocks", "preference")


class Dynamo10(Policy):
    """Dynamo 1.0.2: prefill against decode, in blocks. Ties go to the smallest cache."""

    __slots__ = ()
    name = "dynamo-1.0"
    uses = ("prefill_load_scale", "router_temperature")

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Return the costs of `_cost_kernel.dynamo_1_0`."""
        return self._score(table, settings, NO_PARTS)

    def tie_breakers(self, table: TermTable) -> tuple[FloatArray, ...]:
        """Return the sizes of the caches."""
        return (table.column(HELD_BLOCKS),)

    def parts(self, choice: Choice, settings: PolicySettings) -> tuple[Names, FloatArray]:
        """Return the parts, in blocks."""
        parts = np.empty((len(choice.table), len(_PARTS)))
        self._score(choice.table, settings, parts)
        return _PARTS, parts

    def _score(self, table: TermTable, settings: PolicySettings, parts: FloatArray) -> FloatArray:
        costs = np.empty(len(table))
        dynamo_1_0(table.values, table.isl_tokens, settings.prefill_load_scale, costs, parts)
        return costs


class Dynamo16(Policy):
    """Dynamo 1.6.1: with credits for every tier, decay, and active requests."""

    __slots__ = ()
    name = "dynamo-1.6"
    uses = (
        "prefill_load_scale",
        "router_temperature",
        "overlap_score_credit",
        "overlap_score_credit_decay",
        "host_cache_hit_weight",
        "disk_cache_hit_weight",
        "shared_cache_multiplier",
        "decode_active_request_weight",
        "track_prefill_tokens",
    )

    def score(self, table: TermTable, settings: PolicySettings) -> FloatArray:
        """Return the costs of `_cost_kernel.dynamo_1_6`."""
        return self._score(table, settings, NO_PARTS)

    def parts(self, choice: Choice, settings: PolicySettings) -> tuple[Names, FloatArray]:
        """Return the parts, in blocks."""
        parts = np.empty((len(choice.table), len(_PARTS)))
        self._score(choice.table, settings, parts)
        return _PARTS, parts

    def _score(self, table: TermTable, settings: PolicySettings, parts: FloatArray) -> FloatArray:
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
            parts,
        )
        return costs
