"""Configuration of the router process; `kv-router serve --help` prints it."""

from typing import Annotated

from msgspec import Meta, structs

from router.core_settings import CoreSettings
from router.discovery_config import DiscoveryConfig
from router.errors import ConfigError
from router.fleet import LivenessLimits
from router.indexer.approximate import ApproximateLimits
from router.indexer.base import IndexMode
from router.indexer.selection import IndexSettings, index_mode
from router.process.settings import id_of_name
from router.protocol.subjects import NAMESPACE_PATTERN
from router.security.block_keys import read_secret
from router.selections import SelectionLimits
from router.sequence.naming import BlockNaming
from router.sequence.tracking_names import ALGORITHM, KEY_BYTES, TrackingKey

DECISION_SETTINGS = (
    "policy",
    "group_policies",
    "overlap_score_weight",
    "prefill_load_scale",
    "router_temperature",
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "shared_cache_multiplier",
    "decode_active_request_weight",
    "delay_weight",
    "router_track_prefill_tokens",
    "trust_weight_lagging",
    "trust_weight_degraded",
    "trust_weight_blind",
    "use_kv_events",
    "approximate_ttl_s",
    "approximate_max_blocks",
    "approximate_prune_target",
    "predicted_ttl_s",
    "reservation_ttl_s",
    "max_reservations",
    "worker_silence_s",
    "index_max_blocks",
    "router_track_active_blocks",
    "router_track_output_blocks",
    "router_track_prefill_tokens",
    "router_assume_kv_reuse",
    "router_prefill_load_model",
    "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold",
    "active_prefill_tokens_threshold_frac",
    "busy_hysteresis",
    "session_affinity_mode",
    "lora_affinity_weight",
    "router_queue_threshold",
    "router_queue_policy",
    "router_policy_config",
    "max_wait_s",
    "max_waiting_requests",
    "max_waiting_tokens",
)
"""The settings of a router that decisions depend on, in one thread."""


class RouterConfig(DiscoveryConfig, frozen=True, kw_only=True):
    """Everything a router can be told."""

    use_kv_events: Annotated[
        bool,
        Meta(
            description=(
                "learn what is cached from the engines' events; no: guess it from bookings"
            )
        ),
    ] = True
    approximate_ttl_s: Annotated[
        float, Meta(gt=0, description="without events: how long a booked prompt counts as cached")
    ] = 120.0
    approximate_max_blocks: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 28,
            description=(
                "guessed blocks per model and routing group; beyond that, the oldest are pruned"
            ),
        ),
    ] = 1 << 20
    approximate_prune_target: Annotated[
        float, Meta(ge=0, le=1, description="pruning leaves this fraction of the guessed blocks")
    ] = 0.8
    predicted_ttl_s: Annotated[
        float,
        Meta(ge=0, description="with events: how long a booked prompt counts as cached; 0: off"),
    ] = 0.0
    reservation_ttl_s: Annotated[
        float, Meta(gt=0, description="a reservation that shows no progress for this long is freed")
    ] = 300.0
    max_reservations: Annotated[
        int, Meta(ge=1, description="reservations at the same time; beyond that, 503")
    ] = 1_000_000
    selection_cache_ttl_s: Annotated[
        float, Meta(gt=0, description="how long a selection can be reserved by its id")
    ] = 120.0
    selection_cache_max_entries: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 24,
            description="selections kept for that; beyond that, the oldest is dropped",
        ),
    ] = 4_096
    selection_cache_max_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            description="memory for them, approximately; beyond that, the oldest is dropped",
        ),
    ] = 256 * 1024 * 1024
    router_replica_sync: Annotated[
        bool, Meta(description="share reservations with the other routers on the bus")
    ] = True

    shadow: Annotated[
        bool,
        Meta(
            description=(
                "only compare our choices with those of a Dynamo router, and book the latter"
            )
        ),
    ] = False
    dynamo_namespace: Annotated[
        str,
        Meta(
            pattern=f"^({NAMESPACE_PATTERN})?$",
            description="namespace of a Dynamo fleet to follow; empty: none",
        ),
    ] = ""
    dynamo_component: Annotated[
        str,
        Meta(
            pattern=f"^({NAMESPACE_PATTERN})?$",
            description="component of the Dynamo fleet's workers, such as backend",
        ),
    ] = ""
    dynamo_nats_url: Annotated[
        str, Meta(description="NATS server of the Dynamo fleet; empty: nats_url")
    ] = ""
    dynamo_model_name: Annotated[
        str,
        Meta(
            min_length=1, max_length=256, description="model that the Dynamo fleet's workers serve"
        ),
    ] = "default"
    dynamo_routing_group: Annotated[
        str,
        Meta(
            min_length=1, max_length=256, description="routing group of the Dynamo fleet's workers"
        ),
    ] = "default"
    dynamo_block_size: Annotated[
        int,
        Meta(
            ge=0,
            le=65_536,
            description=(
                "tokens per block in the Dynamo fleet; required, since its events do not say it"
            ),
        ),
    ] = 0
    dynamo_max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="max_num_batched_tokens of each of the Dynamo fleet's workers")
    ] = 8192
    dynamo_total_kv_blocks: Annotated[
        int, Meta(ge=1, description="KV blocks of each rank of the Dynamo fleet")
    ] = 16_384
    dynamo_max_ranks: Annotated[
        int,
        Meta(ge=1, le=65_536, description="ranks of the Dynamo fleet that are followed at most"),
    ] = 1024
    dynamo_silence_s: Annotated[
        float,
        Meta(
            gt=0, description="a worker of the Dynamo fleet that is silent for this long is removed"
        ),
    ] = 600.0

    @property
    def router_id(self) -> int:
        """Made from name and port, so that it survives restarts."""
        return id_of_name(f"{self.name}:{self.http_port}")

    @property
    def shares_reservations(self) -> bool:
        """Whether the other routers hear what this one books; a shadow's bookings are another's."""
        return self.router_replica_sync and bool(self.nats_url) and not self.shadow

    @property
    def selection_limits(self) -> SelectionLimits:
        """Of selections that may be reserved."""
        return SelectionLimits(
            self.selection_cache_ttl_s,
            self.selection_cache_max_entries,
            self.selection_cache_max_bytes,
        )

    @property
    def naming(self) -> BlockNaming:
        """How blocks are named, in bookings as well. Raises ConfigError."""
        return structs.replace(super().naming, tracking=self.tracking_key)

    @property
    def tracking_key(self) -> TrackingKey | None:
        """The secret under which bookings name blocks, if they do. Raises ConfigError."""
        path = self.router_tracking_key_file
        if self.router_tracking_hash != ALGORITHM or not path:
            return None
        secret = read_secret("router_tracking_key_file", path)
        if len(secret) != KEY_BYTES:
            allowed = f"{KEY_BYTES}, such as `openssl rand -hex {KEY_BYTES}` gives"
            raise ConfigError("router_tracking_key_file", f"{len(secret)} bytes", allowed)
        return TrackingKey(secret, self.router_tracking_key_id)

    @property
    def core(self) -> CoreSettings:
        """The part that concerns decisions."""
        return CoreSettings(
            router_id=self.router_id,
            policy=self.policy_settings,
            liveness=LivenessLimits(silence_s=self.worker_silence_s),
            reservation_ttl_s=self.reservation_ttl_s,
            max_reservations=self.max_reservations,
            mode=index_mode(self.index),
            prediction=self._prediction,
            tracking=self.tracking,
            gate=self.gate,
            default_policy=self.policy,
            group_policies=self.policies_by_group,
            queueing=self.queueing,
            naming=self.naming,
            models_prefill=self.router_prefill_load_model == "ais",
        )

    @property
    def index(self) -> IndexSettings:
        """The index that events are applied to, if they are."""
        return structs.replace(
            super().index,
            overlap_score_weight=self.overlap_score_weight,
            use_kv_events=self.use_kv_events,
        )

    @property
    def _prediction(self) -> ApproximateLimits | None:
        """Limits of what is guessed from bookings; None: nothing is."""
        mode = index_mode(self.index)
        ttl_s = self.predicted_ttl_s if mode is IndexMode.EVENTS else self.approximate_ttl_s
        if mode is IndexMode.NONE or not ttl_s:
            return None
        return ApproximateLimits(ttl_s, self.approximate_max_blocks, self.approximate_prune_target)
