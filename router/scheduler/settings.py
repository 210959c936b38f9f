"""The settings of policies, and their overrides by requests."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from router.protocol.replies import TrustState
from router.protocol.requests import ConfigOverride
from router.protocol.values import Phase

DEFAULT_POLICY = "predictive"

NO_GROUPS: Mapping[str, str] = MappingProxyType({})

QueuePolicy: TypeAlias = Literal["fcfs", "lcfs", "wspt", "deadline"]
"""The order of a tenant's requests in a queue."""

OBJECTIVES = ("slo_ttft_ms", "slo_tpot_ms")
"""Fields of requests, and settings of policy classes, that a policy may use as well."""


class TrustWeights(Struct, frozen=True):
    """Weights of a block of overlap, by trust in it, for policies that predict."""

    exact: float = 1.0
    lagging: float = 1.0
    degraded: float = 0.5
    approximate: float = 0.5
    blind: float = 0.0
    unreachable: float = 0.0

    def weight(self, state: TrustState) -> float:
        """Return the weight of a block in this state."""
        return float(getattr(self, state))


class PolicySettings(Struct, frozen=True):
    """Settings of all policies; each policy reads its own.

    `prefill_load_scale`: blocks of decode load that one block of prefill work counts for (Dynamo
    1.0's overlap_score_weight). `overlap_score_credit`, `host_cache_hit_weight`,
    `disk_cache_hit_weight`, `shared_cache_multiplier`: value of a block of overlap, by the fastest
    tier that has it. `overlap_score_credit_decay`: how fast the first of these falls with prefill
    work booked above the least busy candidate's. `decode_active_request_weight`: blocks that an
    active request counts for, in addition to its own. `track_prefill_tokens`: False if other ranks
    compute the prompt. `delay_weight`: weight of a second after a first token, relative to one
    before it.
    """

    prefill_load_scale: float = 1.0
    router_temperature: float = 0.0
    trust_weights: TrustWeights = TrustWeights()
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    decode_active_request_weight: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.0
    track_prefill_tokens: bool = True
    delay_weight: float = 0.1

    def of_phase(self, phase: Phase | None) -> "PolicySettings":
        """Return the settings for a phase; in `decode`, prefill and cached blocks do not count."""
        if phase != "decode":
            return self
        changes = {"prefill_load_scale": 0.0, "overlap_score_credit": 0.0}
        return replace(self, track_prefill_tokens=False, **changes)

    def overridden(self, override: ConfigOverride | None) -> "PolicySettings":
        """Return these settings with a request's overrides applied."""
        if override is None:
            return self
        given = {
            name: value for name in _OVERRIDABLE if (value := getattr(override, name)) is not None
        }
        weight = override.overlap_score_weight
        if weight is not None:
            given["prefill_load_scale"] = weight
        if weight == 0:
            given["overlap_score_credit"] = 0.0
        return replace(self, **given) if given else self


_OVERRIDABLE = (
    "prefill_load_scale",
    "router_temperature",
    "overlap_score_credit",
    "shared_cache_multiplier",
    "track_prefill_tokens",
)
