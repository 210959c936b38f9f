"""Settings of the policies; `--help` prints them.

Fields that Dynamo's routers also have carry the same names.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta, Struct

from router.runtime.process.settings import COMMON, DECIDES, LIVE, about
from router.scheduler.settings import DEFAULT_POLICY, PolicySettings, TrustWeights

if TYPE_CHECKING:
    from router.scheduler.selector import Selector
    from router.scheduler.splits import Splits

TRUST_STATES = ("lagging", "degraded", "approximate", "blind")

FIELD_OF: Mapping[str, str] = MappingProxyType(
    {
        "overlap_score_weight": "prefill_load_scale",
        **{f"trust_weight_{state}": "trust_weights" for state in TRUST_STATES},
        **{
            name: name
            for name in (
                "prefill_load_scale",
                "router_temperature",
                "overlap_score_credit",
                "overlap_score_credit_decay",
                "host_cache_hit_weight",
                "disk_cache_hit_weight",
                "shared_cache_multiplier",
                "decode_active_request_weight",
                "delay_weight",
            )
        },
    }
)
"""The field of `PolicySettings` that each setting of placement sets."""


_DYNAMO = ("dynamo-1.0", "dynamo-1.6")
_DRAWING = (
    *_DYNAMO,
    "round-robin",
    "least-loaded",
    "power-of-two",
    "cache-aware",
    "lmetric",
    "predictive",
)

USED_BY: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "overlap_score_weight": _DYNAMO,
        "prefill_load_scale": _DYNAMO,
        "router_temperature": _DRAWING,
        "overlap_score_credit": ("dynamo-1.6",),
        "overlap_score_credit_decay": ("dynamo-1.6",),
        "host_cache_hit_weight": ("dynamo-1.6", "predictive"),
        "disk_cache_hit_weight": ("dynamo-1.6", "predictive"),
        "shared_cache_multiplier": ("dynamo-1.6", "predictive"),
        "decode_active_request_weight": ("dynamo-1.6",),
        "delay_weight": ("predictive",),
        **{f"trust_weight_{state}": ("predictive",) for state in TRUST_STATES},
    }
)
"""The policies of this router that use each setting of placement, as they declare it (`uses`).

Repeated here, because `--help` loads no policy; a test compares the two.
"""


def _placing(name: str, text: str, **limits: Any) -> Meta:
    """Return the annotation of a setting of placement, which names the policies that use it."""
    return about(f"{text}; used by {', '.join(USED_BY[name])}", DECIDES | LIVE, **limits)


class PolicyConfig(Struct, frozen=True, kw_only=True):
    """Settings of the policy in use, and of the policies' weights."""

    GROUP: ClassVar[str] = "placement"

    policy: Annotated[
        str,
        about(
            "policy for requests where neither the routing group nor the body names one",
            DECIDES | COMMON | LIVE,
            unit="POLICY",
        ),
    ] = DEFAULT_POLICY
    group_policies: Annotated[
        str,
        about(
            "policies of routing groups: group=policy pairs, separated by commas",
            DECIDES | LIVE,
            unit="GROUP=POLICY,…",
        ),
    ] = ""
    group_splits: Annotated[
        str,
        about(
            "routing groups whose requests are split over groups by weight, for all models or one",
            LIVE,
            unit="GROUP[@MODEL]=GROUP:WEIGHT+GROUP:WEIGHT,…",
        ),
    ] = ""
    shadow_policy: Annotated[
        str,
        about(
            "policy that chooses beside the one in force, only to be compared; empty: none",
            LIVE,
            unit="POLICY",
        ),
    ] = ""
    overlap_score_weight: Annotated[
        float,
        _placing(
            "overlap_score_weight",
            "weight of a block to prefill, in blocks of decode load; 0 turns the index off",
            ge=0,
            le=1e9,
        ),
    ] = 1.0
    prefill_load_scale: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        _placing(
            "prefill_load_scale",
            "newer name of overlap_score_weight; here 0 leaves the index on",
            unit="WEIGHT",
        ),
    ] = None
    router_temperature: Annotated[
        float,
        _placing(
            "router_temperature",
            "0: take the cheapest rank; above 0: draw a rank at random, by softmax over costs",
            ge=0,
            le=1e9,
            unit="TEMPERATURE",
        ),
    ] = 0.0
    overlap_score_credit: Annotated[
        float,
        _placing(
            "overlap_score_credit",
            "credit for each block cached on the device",
            ge=0,
            le=1e9,
            unit="WEIGHT",
        ),
    ] = 1.0
    overlap_score_credit_decay: Annotated[
        float,
        _placing(
            "overlap_score_credit_decay",
            "how fast that credit falls with the prefill reserved on the rank",
            ge=0,
            le=1e9,
            unit="RATE",
        ),
    ] = 0.0
    host_cache_hit_weight: Annotated[
        float,
        _placing(
            "host_cache_hit_weight",
            "weight of each further block cached in host memory",
            ge=0,
            le=1,
        ),
    ] = 0.75
    disk_cache_hit_weight: Annotated[
        float,
        _placing(
            "disk_cache_hit_weight", "weight of each further block cached on disk", ge=0, le=1
        ),
    ] = 0.25
    shared_cache_multiplier: Annotated[
        float,
        _placing(
            "shared_cache_multiplier",
            "weight of each further block in the remote tier",
            ge=0,
            le=1,
            unit="WEIGHT",
        ),
    ] = 0.0
    decode_active_request_weight: Annotated[
        float,
        _placing(
            "decode_active_request_weight", "cost of each active request, in blocks", ge=0, le=1e9
        ),
    ] = 0.0
    delay_weight: Annotated[
        float,
        _placing(
            "delay_weight", "cost of delaying other requests by a second, in seconds", ge=0, le=1e9
        ),
    ] = 0.1
    trust_weight_lagging: Annotated[
        float,
        _placing(
            "trust_weight_lagging",
            "how much overlap counts where the rank's trust is lagging",
            ge=0,
            le=1,
            unit="WEIGHT",
        ),
    ] = 1.0
    trust_weight_degraded: Annotated[
        float,
        _placing(
            "trust_weight_degraded",
            "how much overlap counts where it is degraded",
            ge=0,
            le=1,
            unit="WEIGHT",
        ),
    ] = 0.5
    trust_weight_approximate: Annotated[
        float,
        _placing(
            "trust_weight_approximate",
            "how much overlap counts where it is estimated from bookings",
            ge=0,
            le=1,
            unit="WEIGHT",
        ),
    ] = 0.5
    trust_weight_blind: Annotated[
        float,
        _placing(
            "trust_weight_blind",
            "how much overlap counts where it is blind",
            ge=0,
            le=1,
            unit="WEIGHT",
        ),
    ] = 0.0

    @property
    def policies_by_group(self) -> dict[str, str]:
        """Policy names by routing group. Raises ConfigError."""
        from router.scheduler.policy.registry import parsed_groups

        return parsed_groups(self.group_policies)

    @property
    def splits(self) -> "Splits":
        """The splits of routing groups. Raises ConfigError."""
        from router.scheduler.splits import parsed_splits

        return parsed_splits(self.group_splits)

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

    def in_force(self, selectors: Sequence["Selector"]) -> list["Selector"]:
        """Return `policy` and those of groups, among the available `selectors`."""
        names = {self.policy, *self.policies_by_group.values()}
        return [each for each in selectors if each.name in names]

    def unused(self, selectors: Sequence["Selector"]) -> dict[str, str]:
        """Return the settings that were set and no policy in force uses, with sentences."""
        from router.scheduler.ignored import no_effect, unread

        in_force, found = self.in_force(selectors), {}
        for name, field in FIELD_OF.items():
            value = getattr(self, name)
            turns_index_off = name == "overlap_score_weight" and value == 0
            if value == getattr(_DEFAULT, name) or turns_index_off:
                continue
            reason = unread((field,), in_force, selectors)
            if reason is not None:
                found[name] = no_effect(name, value, reason)
        return found


_DEFAULT = PolicyConfig()
