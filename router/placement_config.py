"""Configuration of what bounds and binds placements, whatever the policy; `--help` prints it.

Fields that Dynamo's routers have too are named as there, but for units.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from router.scheduler.busy import BusyThresholds
from router.scheduler.gate import GateSettings
from router.sequence.tracking import Tracking
from router.service_config import ServiceConfig

PrefillLoadModel: TypeAlias = Literal["none", "ais"]
TrackingHash: TypeAlias = Literal["public-xxh3-v1", "keyed-xxh3-v1"]
AffinityMode: TypeAlias = Literal["hard", "soft"]


class PlacementConfig(ServiceConfig, frozen=True, kw_only=True):
    """What is tracked of requests, who is too busy for more, and where sessions stay."""

    router_track_active_blocks: Annotated[
        bool,
        Meta(
            description=(
                "count the KV blocks of booked requests as load; no: only their prefill tokens"
            )
        ),
    ] = True
    router_track_output_blocks: Annotated[
        bool,
        Meta(
            description=(
                "count output blocks as load; no: they only show that the request is alive"
            )
        ),
    ] = True
    router_track_prefill_tokens: Annotated[
        bool,
        Meta(
            description=(
                "count the prefill tokens of booked requests; no: prompts are computed elsewhere"
            )
        ),
    ] = True
    router_assume_kv_reuse: Annotated[
        bool,
        Meta(
            description=(
                "count a prefix that several requests share once; no: once for each request"
            )
        ),
    ] = True
    router_prefill_load_model: Annotated[
        PrefillLoadModel,
        Meta(
            description=(
                "ais: of a prompt in prefill, count only the part that should not be computed yet"
            )
        ),
    ] = "none"
    router_tracking_hash: Annotated[
        TrackingHash,
        Meta(
            description=(
                "keyed: reservations name blocks by keyed hashes, towards other routers as well"
            )
        ),
    ] = "public-xxh3-v1"
    router_tracking_key_file: Annotated[
        str, Meta(description="file with the key of keyed hashes: 32 bytes, raw or in hexadecimal")
    ] = ""
    router_tracking_key_id: Annotated[
        str, Meta(max_length=256, description="name of that key; part of every block's name")
    ] = ""
    active_decode_blocks_threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description=("a rank is busy above this fraction of its blocks in use; none: no limit")
        ),
    ] = None
    active_prefill_tokens_threshold: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description=(
                "a rank is busy above this number of prompt tokens to compute; none: no limit"
            )
        ),
    ] = None
    active_prefill_tokens_threshold_frac: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        Meta(description="the same limit as a multiple of the rank's max_num_batched_tokens"),
    ] = None
    busy_hysteresis: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "a busy rank counts as free again once it is this fraction below its threshold"
            ),
        ),
    ] = 0.1
    lora_affinity_weight: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description=(
                "weight of the preference for ranks that have loaded the request's "
                "LoRA adapter; 0: off"
            ),
        ),
    ] = 0.0
    session_affinity_ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            le=31_536_000,
            description=(
                "a session stays on its rank until it has been idle for this long; 0: "
                "no session affinity"
            ),
        ),
    ] = 0.0
    session_affinity_mode: Annotated[
        AffinityMode,
        Meta(
            description=(
                "hard: requests of a session wait for its rank; soft: while it is busy "
                "they go to another"
            )
        ),
    ] = "hard"
    session_affinity_max_sessions: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 24,
            description=(
                "sessions remembered by this router; beyond that, the one idle for "
                "longest is forgotten"
            ),
        ),
    ] = 65_536
    redis_url: Annotated[
        str,
        Meta(
            description=(
                "Redis server in which routers share sessions; empty: each router keeps its own"
            )
        ),
    ] = ""
    redis_username: Annotated[
        str, Meta(description="Redis user (ACL); empty: the default user")
    ] = ""
    redis_password_file: Annotated[str, Meta(description="file with that user's password")] = ""
    redis_tls_ca_file: Annotated[
        str,
        Meta(description="PEM file of certificate authorities for rediss://; empty: the system's"),
    ] = ""
    redis_tls_cert_file: Annotated[str, Meta(description="PEM certificate for Redis")] = ""
    redis_tls_key_file: Annotated[
        str, Meta(description="PEM file of the certificate's private key")
    ] = ""
    redis_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=10,
            description="time for Redis to answer; after that the router goes on without it",
        ),
    ] = 0.05
    min_initial_workers: Annotated[
        int,
        Meta(
            ge=0, le=65_536, description="number of workers the router must know before it is ready"
        ),
    ] = 0

    @property
    def gate(self) -> GateSettings:
        """Who may serve a request, beside what it demands."""
        thresholds = BusyThresholds(
            active_decode_blocks_threshold=self.active_decode_blocks_threshold,
            active_prefill_tokens_threshold=self.active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac=self.active_prefill_tokens_threshold_frac,
        )
        is_hard = self.session_affinity_mode == "hard"
        return GateSettings(thresholds, self.busy_hysteresis, is_hard, self.lora_affinity_weight)

    @property
    def tracking(self) -> Tracking:
        """What is counted of bookings."""
        return Tracking(
            active_blocks=self.router_track_active_blocks,
            output_blocks=self.router_track_output_blocks,
            prefill_tokens=self.router_track_prefill_tokens,
            kv_reuse=self.router_assume_kv_reuse,
        )
