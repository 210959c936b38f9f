"""Configuration of the policies that choose; `--help` prints it.

Fields that Dynamo's routers have too are named as there.
"""

from typing import Annotated

from msgspec import Meta

from router.placement_config import PlacementConfig
from router.scheduler.policies import DEFAULT_POLICY, parsed_groups
from router.scheduler.settings import PolicySettings, TrustWeights


class PolicyConfig(PlacementConfig, frozen=True, kw_only=True):
    """Which policy chooses, and what the policies weigh by."""

    policy: Annotated[
        str,
        Meta(
            description=(
                "policy for requests where neither the routing group nor the body names one"
            )
        ),
    ] = DEFAULT_POLICY
    group_policies: Annotated[
        str, Meta(description="policies of routing groups: group=policy pairs, separated by commas")
    ] = ""
    overlap_score_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description=(
                "weight of one block to prefill, in blocks of decode load; 0 turns the index off"
            ),
        ),
    ] = 1.0
    prefill_load_scale: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        Meta(description="newer name of overlap_score_weight; here 0 leaves the index on"),
    ] = None
    router_temperature: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description=(
                "0: take the cheapest rank; above 0: draw a rank at random, by softmax over costs"
            ),
        ),
    ] = 0.0
    overlap_score_credit: Annotated[
        float,
        Meta(ge=0, le=1e9, description="dynamo-1.6: credit for each block cached on the device"),
    ] = 1.0
    overlap_score_credit_decay: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description=(
                "dynamo-1.6: how fast that credit falls with the prefill already booked on the rank"
            ),
        ),
    ] = 0.0
    host_cache_hit_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="dynamo-1.6: credit for each further block cached in host memory",
        ),
    ] = 0.75
    disk_cache_hit_weight: Annotated[
        float,
        Meta(ge=0, le=1, description="dynamo-1.6: credit for each further block cached on disk"),
    ] = 0.25
    shared_cache_multiplier: Annotated[
        float,
        Meta(
            ge=0, le=1, description="dynamo-1.6: credit for each further block in the remote tier"
        ),
    ] = 0.0
    decode_active_request_weight: Annotated[
        float,
        Meta(ge=0, le=1e9, description="dynamo-1.6: cost of each active request, in blocks"),
    ] = 0.0
    delay_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="predictive: cost of delaying other requests by a second, in seconds",
        ),
    ] = 0.1
    trust_weight_lagging: Annotated[
        float,
        Meta(ge=0, le=1, description="how much overlap counts where the rank's trust is lagging"),
    ] = 1.0
    trust_weight_degraded: Annotated[
        float, Meta(ge=0, le=1, description="how much overlap counts where it is degraded")
    ] = 0.5
    trust_weight_blind: Annotated[
        float, Meta(ge=0, le=1, description="how much overlap counts where it is blind")
    ] = 0.0

    @property
    def policies_by_group(self) -> dict[str, str]:
        """Names of policies. Raises ConfigError."""
        return parsed_groups(self.group_policies)

    @property
    def policy_settings(self) -> PolicySettings:
        """What policies are told, where a request wants nothing else."""
        scale = self.prefill_load_scale
        return PolicySettings(
            prefill_load_scale=self.overlap_score_weight if scale is None else scale,
            router_temperature=self.router_temperature,
            trust_weights=TrustWeights(
                lagging=self.trust_weight_lagging,
                degraded=self.trust_weight_degraded,
                blind=self.trust_weight_blind,
            ),
            overlap_score_credit=self.overlap_score_credit,
            overlap_score_credit_decay=self.overlap_score_credit_decay,
            decode_active_request_weight=self.decode_active_request_weight,
            host_cache_hit_weight=self.host_cache_hit_weight,
            disk_cache_hit_weight=self.disk_cache_hit_weight,
            shared_cache_multiplier=self.shared_cache_multiplier,
            track_prefill_tokens=self.router_track_prefill_tokens,
            delay_weight=self.delay_weight,
        )
