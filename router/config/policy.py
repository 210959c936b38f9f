"""Settings of the policies; `--help` prints them.

Fields that Dynamo's routers also have carry the same names.
"""

from typing import Annotated

from msgspec import Meta, Struct

from router.runtime.process.settings import DECIDES, about
from router.scheduler.policy.registry import DEFAULT_POLICY, parsed_groups
from router.scheduler.settings import PolicySettings, TrustWeights


class PolicyConfig(Struct, frozen=True, kw_only=True):
    """Settings of the policy in use, and of the policies' weights."""

    policy: Annotated[
        str,
        about(
            "policy for requests where neither the routing group nor the body names one", DECIDES
        ),
    ] = DEFAULT_POLICY
    group_policies: Annotated[
        str, about("policies of routing groups: group=policy pairs, separated by commas", DECIDES)
    ] = ""
    overlap_score_weight: Annotated[
        float,
        about(
            "weight of one block to prefill, in blocks of decode load; 0 turns the index off",
            DECIDES,
            ge=0,
            le=1e9,
        ),
    ] = 1.0
    prefill_load_scale: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        about("newer name of overlap_score_weight; here 0 leaves the index on", DECIDES),
    ] = None
    router_temperature: Annotated[
        float,
        about(
            "0: take the cheapest rank; above 0: draw a rank at random, by softmax over costs",
            DECIDES,
            ge=0,
            le=1e9,
        ),
    ] = 0.0
    overlap_score_credit: Annotated[
        float,
        about("dynamo-1.6: credit for each block cached on the device", DECIDES, ge=0, le=1e9),
    ] = 1.0
    overlap_score_credit_decay: Annotated[
        float,
        about(
            "dynamo-1.6: how fast that credit falls with the prefill reserved on the rank",
            DECIDES,
            ge=0,
            le=1e9,
        ),
    ] = 0.0
    host_cache_hit_weight: Annotated[
        float,
        about(
            "dynamo-1.6: credit for each further block cached in host memory", DECIDES, ge=0, le=1
        ),
    ] = 0.75
    disk_cache_hit_weight: Annotated[
        float,
        about("dynamo-1.6: credit for each further block cached on disk", DECIDES, ge=0, le=1),
    ] = 0.25
    shared_cache_multiplier: Annotated[
        float,
        about("dynamo-1.6: credit for each further block in the remote tier", DECIDES, ge=0, le=1),
    ] = 0.0
    decode_active_request_weight: Annotated[
        float, about("dynamo-1.6: cost of each active request, in blocks", DECIDES, ge=0, le=1e9)
    ] = 0.0
    delay_weight: Annotated[
        float,
        about(
            "predictive: cost of delaying other requests by a second, in seconds",
            DECIDES,
            ge=0,
            le=1e9,
        ),
    ] = 0.1
    trust_weight_lagging: Annotated[
        float,
        about("how much overlap counts where the rank's trust is lagging", DECIDES, ge=0, le=1),
    ] = 1.0
    trust_weight_degraded: Annotated[
        float, about("how much overlap counts where it is degraded", DECIDES, ge=0, le=1)
    ] = 0.5
    trust_weight_approximate: Annotated[
        float,
        about("how much overlap counts where it is estimated from bookings", DECIDES, ge=0, le=1),
    ] = 0.5
    trust_weight_blind: Annotated[
        float, about("how much overlap counts where it is blind", DECIDES, ge=0, le=1)
    ] = 0.0

    @property
    def policies_by_group(self) -> dict[str, str]:
        """Policy names by routing group. Raises ConfigError."""
        return parsed_groups(self.group_policies)

    def settings(self, *, tracks_prefill: bool) -> PolicySettings:
        """Return the policies' settings, unless a request overrides them."""
        scale = self.prefill_load_scale
        return PolicySettings(
            prefill_load_scale=self.overlap_score_weight if scale is None else scale,
            router_temperature=self.router_temperature,
            trust_weights=TrustWeights(
                lagging=self.trust_weight_lagging,
                degraded=self.trust_weight_degraded,
                approximate=self.trust_weight_approximate,
                blind=self.trust_weight_blind,
            ),
            overlap_score_credit=self.overlap_score_credit,
            overlap_score_credit_decay=self.overlap_score_credit_decay,
            decode_active_request_weight=self.decode_active_request_weight,
            host_cache_hit_weight=self.host_cache_hit_weight,
            disk_cache_hit_weight=self.disk_cache_hit_weight,
            shared_cache_multiplier=self.shared_cache_multiplier,
            track_prefill_tokens=tracks_prefill,
            delay_weight=self.delay_weight,
        )
