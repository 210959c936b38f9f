"""Settings that bound placements, for any policy; `--help` prints them.

Fields that Dynamo's routers also have carry the same names, except for units.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct

from router.errors import ConfigError
from router.protocol.values import KEYED_SCHEME
from router.runtime.process.settings import DECIDES, LIVE, about
from router.runtime.security.secret_files import read_secret
from router.sequence.active.footprint import TrackedParts

if TYPE_CHECKING:
    from router.scheduler.eligibility import EligibilitySettings
    from router.sequence.hashing.keyed_hashes import TrackingKey

PrefillLoadModel: TypeAlias = Literal["none", "ais"]
TrackingHash: TypeAlias = Literal["public-xxh3-v1", "keyed-xxh3-v1"]


class PlacementConfig(Struct, frozen=True, kw_only=True):
    """Settings of load tracking, block names in bookings, and busy thresholds."""

    GROUP: ClassVar[str] = "placement"

    router_track_active_blocks: Annotated[
        bool,
        about(
            "count the KV blocks of reserved requests as load; no: only their prefill tokens",
            DECIDES,
        ),
    ] = True
    router_track_output_blocks: Annotated[
        bool, about("count output blocks as load; no: they only keep the request alive", DECIDES)
    ] = True
    router_track_prefill_tokens: Annotated[
        bool,
        about(
            "count the prefill tokens of reserved requests; no: prompts are computed elsewhere",
            DECIDES,
        ),
    ] = True
    router_assume_kv_reuse: Annotated[
        bool,
        about(
            "count a prefix that several requests share once; no: once for each request", DECIDES
        ),
    ] = True
    router_prefill_load_model: Annotated[
        PrefillLoadModel,
        about(
            "ais: of a prompt in prefill, count only the part that should still be uncomputed",
            DECIDES,
        ),
    ] = "none"
    router_tracking_hash: Annotated[
        TrackingHash,
        about("keyed: reservations name blocks by keyed hashes, towards other routers as well"),
    ] = "public-xxh3-v1"
    router_tracking_key_file: Annotated[
        str, about("file with the key of keyed hashes: 32 bytes, raw or in hexadecimal")
    ] = ""
    router_tracking_key_id: Annotated[
        str, about("name of that key; part of every block's name", max_length=256, unit="NAME")
    ] = ""
    active_decode_blocks_threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        about(
            "a rank is busy above this fraction of its blocks in use; none: no limit",
            DECIDES | LIVE,
            unit="FRACTION",
        ),
    ] = None
    active_prefill_tokens_threshold: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about(
            "a rank is busy above this number of prompt tokens to compute; none: no limit",
            DECIDES | LIVE,
            unit="TOKENS",
        ),
    ] = None
    active_prefill_tokens_threshold_frac: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        about("the same limit as a multiple of the rank's max_num_batched_tokens", DECIDES | LIVE),
    ] = None
    busy_hysteresis: Annotated[
        float,
        about(
            "a busy rank counts as free again once it is this fraction below its threshold",
            DECIDES | LIVE,
            ge=0,
            le=1,
            unit="FRACTION",
        ),
    ] = 0.1
    lora_affinity_weight: Annotated[
        float,
        about(
            "weight of the preference for ranks that have loaded the request's "
            "LoRA adapter; 0: off",
            DECIDES | LIVE,
            ge=0,
            le=1e9,
        ),
    ] = 0.0
    min_initial_workers: Annotated[
        int, about("number of workers the router must know before it is ready", ge=0, le=65_536)
    ] = 0

    def gate(self, *, is_affinity_hard: bool) -> "EligibilitySettings":
        """Return the filters for eligible ranks, apart from the request's own constraints."""
        from router.scheduler.busy import BusyThresholds
        from router.scheduler.eligibility import EligibilitySettings

        thresholds = BusyThresholds(
            active_decode_blocks_threshold=self.active_decode_blocks_threshold,
            active_prefill_tokens_threshold=self.active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac=self.active_prefill_tokens_threshold_frac,
        )
        return EligibilitySettings(
            thresholds, self.busy_hysteresis, is_affinity_hard, self.lora_affinity_weight
        )

    @property
    def tracking_key(self) -> "TrackingKey | None":
        """The key of the block names in bookings, or None if they have none. Raises ConfigError."""
        path = self.router_tracking_key_file
        if self.router_tracking_hash != KEYED_SCHEME or not path:
            return None
        from router.sequence.hashing.keyed_hashes import KEY_BYTES, TrackingKey

        secret = read_secret("router_tracking_key_file", path)
        if len(secret) != KEY_BYTES:
            allowed = f"{KEY_BYTES}, for example from `openssl rand -hex {KEY_BYTES}`"
            raise ConfigError("router_tracking_key_file", f"{len(secret)} bytes", allowed)
        return TrackingKey(secret, self.router_tracking_key_id)

    @property
    def tracking(self) -> TrackedParts:
        """The parts of a reservation that are counted as load."""
        return TrackedParts(
            active_blocks=self.router_track_active_blocks,
            output_blocks=self.router_track_output_blocks,
            prefill_tokens=self.router_track_prefill_tokens,
            kv_reuse=self.router_assume_kv_reuse,
        )
