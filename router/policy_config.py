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
        str, Meta(description="policy of requests whose routing group and body name none")
    ] = DEFAULT_POLICY
    group_policies: Annotated[
        str, Meta(description="policies of routing groups: group=policy, separated by commas")
    ] = ""
    overlap_score_weight: Annotated[
        float,
        Meta(ge=0, le=1e9, description="blocks of decode load one block of prefill counts for"),
    ] = 1.0
    prefill_load_scale: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        Meta(description="the same, by its newer name; 0 leaves the index on"),
    ] = None
    router_temperature: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="0 takes the cheapest rank; above 0, ranks are drawn by softmax",
        ),
    ] = 0.0
    overlap_score_credit: Annotated[
        float, Meta(ge=0, le=1e9, description="dynamo-1.6: what a block of the device tier saves")
    ] = 1.0
    overlap_score_credit_decay: Annotated[
        float,
        Meta(ge=0, le=1e9, description="dynamo-1.6: how fast that falls with prefill booked there"),
    ] = 0.0
    host_cache_hit_weight: Annotated[
        float, Meta(ge=0, le=1, description="dynamo-1.6: what a block beyond it on the host saves")
    ] = 0.75
    disk_cache_hit_weight: Annotated[
        float, Meta(ge=0, le=1, description="dynamo-1.6: what a block beyond those on disk saves")
    ] = 0.25
    shared_cache_multiplier: Annotated[
        float, Meta(ge=0, le=1, description="dynamo-1.6: what a remote block beyond those saves")
    ] = 0.0
    decode_active_request_weight: Annotated[
        float,
        Meta(ge=0, le=1e9, description="dynamo-1.6: blocks an active request counts for"),
    ] = 0.0
    delay_weight: Annotated[
        float,
        Meta(ge=0, le=1e9, description="predictive: weight of a second of delay to other requests"),
    ] = 0.1
    trust_weight_lagging: Annotated[
        float, Meta(ge=0, le=1, description="weight of the overlap of ranks whose trust is lagging")
    ] = 1.0
    trust_weight_degraded: Annotated[
        float, Meta(ge=0, le=1, description="the same for ranks that are degraded")
    ] = 0.5
    trust_weight_blind: Annotated[
        float, Meta(ge=0, le=1, description="the same for ranks that are blind")
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
