"""What policies can be told, after a request's overrides."""

from msgspec import Struct
from msgspec.structs import replace

from router.protocol.replies import TrustState
from router.protocol.requests import ConfigOverride
from router.protocol.values import Phase


class TrustWeights(Struct, frozen=True):
    """What a block of overlap counts for, by the trust in it, where a policy predicts."""

    exact: float = 1.0
    lagging: float = 1.0
    degraded: float = 0.5
    blind: float = 0.0

    def weight(self, state: TrustState) -> float:
        """What a block counts for in this state."""
        return float(getattr(self, state.value))


class PolicySettings(Struct, frozen=True):
    """Settings of all policies; each reads those it knows.

    `prefill_load_scale`: blocks of decode load that one block of prefill work counts for (Dynamo
    1.0's overlap_score_weight). `overlap_score_credit`, `host_cache_hit_weight`,
    `disk_cache_hit_weight`, `shared_cache_multiplier`: what a block of overlap saves, by the
    fastest tier that has it. `overlap_score_credit_decay`: how fast the first of these falls with
    prefill work booked above the least busy candidate's. `decode_active_request_weight`: blocks
    that an active request counts for beside its own. `track_prefill_tokens`: false where others
    compute the prompt. `delay_weight`: what a second after a first token counts for, beside one
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
        """The same where the prompt is computed elsewhere: neither that nor what is cached of it
        counts.
        """
        if phase != "decode":
            return self
        changes = {"prefill_load_scale": 0.0, "overlap_score_credit": 0.0}
        return replace(self, track_prefill_tokens=False, **changes)

    def overridden(self, override: ConfigOverride | None) -> "PolicySettings":
        """These settings, as far as a request does not want others."""
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
