"""Configuration of the router process; `kv-router serve --help` prints it.

Modules with kernels are imported where a setting is put to use: `--help` needs none of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Struct, structs

from router.config.capacity import CapacityConfig
from router.config.discovery import (
    AttachConfig,
    ClusterConfig,
    DiscoveryConfig,
    DynamoConfig,
    PeerConfig,
)
from router.config.observability import ObservabilityConfig
from router.config.openai import OpenAiConfig
from router.config.picker import PickerConfig
from router.config.placement import PlacementConfig
from router.config.policy import PolicyConfig
from router.config.queue import QueueConfig
from router.config.server import BusConfig, IndexConfig, ServiceConfig
from router.config.sessions import SessionConfig
from router.runtime.http_server.config import BodyConfig, HttpServerConfig, LogConfig
from router.runtime.process.settings import COMMON, DECIDES, LIVE, about, id_of_name, settings_of
from router.runtime.security.config import BlockKeyConfig, NatsConfig, SecurityConfig

if TYPE_CHECKING:
    from router.core.selections import SelectionLimits
    from router.core.settings import CoreSettings
    from router.indexer.base import IndexMode
    from router.indexer.factory import IndexSettings
    from router.indexer.predictions import EstimateLimits
    from router.scheduler.selector import Selector
    from router.sequence.hashing.keyed_hashes import HashKeying


class EstimateConfig(Struct, frozen=True, kw_only=True):
    """Blocks that count as cached without events, estimated from bookings.

    Of ranks without events always, and of those with events if `predicted_ttl_s` is set.
    """

    GROUP: ClassVar[str] = "what caches hold"

    use_kv_events: Annotated[
        bool,
        about(
            "track cached blocks by KV events; no: estimate them from reservations",
            DECIDES | COMMON,
        ),
    ] = True
    approximate_ttl_s: Annotated[
        float,
        about("without events: time for which a booked prompt counts as cached", DECIDES, gt=0),
    ] = 120.0
    approximate_max_blocks: Annotated[
        int,
        about(
            "limit of estimated blocks per model and routing group; the oldest are pruned",
            DECIDES,
            ge=1024,
            le=1 << 28,
        ),
    ] = 1 << 20
    approximate_prune_target: Annotated[
        float,
        about(
            "fraction of the estimated blocks left by pruning", DECIDES, ge=0, le=1, unit="FRACTION"
        ),
    ] = 0.8
    predicted_ttl_s: Annotated[
        float,
        about(
            "with events: time for which a booked prompt counts as cached; 0: off", DECIDES, ge=0
        ),
    ] = 0.0

    def limits(self, mode: "IndexMode") -> "EstimateLimits":
        """Return the limits of estimated blocks."""
        from router.indexer.approximate import ApproximateLimits
        from router.indexer.base import IndexMode
        from router.indexer.predictions import NO_ESTIMATES, EstimateLimits

        if mode is IndexMode.NONE:
            return NO_ESTIMATES
        blocks = (self.approximate_max_blocks, self.approximate_prune_target)
        beside = ApproximateLimits(self.predicted_ttl_s, *blocks) if self.predicted_ttl_s else None
        return EstimateLimits(beside, ApproximateLimits(self.approximate_ttl_s, *blocks))


class ReservationConfig(Struct, frozen=True, kw_only=True):
    """Reservations, and selections that may be reserved."""

    GROUP: ClassVar[str] = "bookings"

    reservation_ttl_s: Annotated[
        float, about("a reservation without progress for this time is freed", DECIDES, gt=0)
    ] = 300.0
    max_reservations: Annotated[
        int,
        about(
            "limit of concurrent reservations; beyond it, 503",
            DECIDES | LIVE,
            ge=1,
            unit="RESERVATIONS",
        ),
    ] = 1_000_000
    selection_cache_ttl_s: Annotated[
        float, about("time for which a selection can be reserved by its id", gt=0)
    ] = 120.0
    selection_cache_max_entries: Annotated[
        int,
        about(
            "limit of selections kept for that; the oldest is dropped",
            ge=1,
            le=1 << 24,
            unit="SELECTIONS",
        ),
    ] = 4_096
    selection_cache_max_bytes: Annotated[
        int,
        about("approximate memory limit of cached selections; the oldest is dropped", ge=1 << 16),
    ] = 256 * 1024 * 1024
    router_replica_sync: Annotated[
        bool, about("share reservations with the other routers, on the bus or by router_peers")
    ] = True

    @property
    def selection_limits(self) -> "SelectionLimits":
        """The limits of selections that may be reserved."""
        from router.core.selections import SelectionLimits

        return SelectionLimits(
            self.selection_cache_ttl_s,
            self.selection_cache_max_entries,
            self.selection_cache_max_bytes,
        )


class RouterConfig(Struct, frozen=True, kw_only=True):
    """All settings of a router."""

    security: SecurityConfig = SecurityConfig()
    http: HttpServerConfig = HttpServerConfig(http_port=8092)
    bodies: BodyConfig = BodyConfig()
    logs: LogConfig = LogConfig()
    nats: NatsConfig = NatsConfig()
    block_keys: BlockKeyConfig = BlockKeyConfig()
    service: ServiceConfig = ServiceConfig()
    bus: BusConfig = BusConfig()
    index: IndexConfig = IndexConfig()
    estimates: EstimateConfig = EstimateConfig()
    reservations: ReservationConfig = ReservationConfig()
    placement: PlacementConfig = PlacementConfig()
    sessions: SessionConfig = SessionConfig()
    policy: PolicyConfig = PolicyConfig()
    queue: QueueConfig = QueueConfig()
    capacity: CapacityConfig = CapacityConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    attach: AttachConfig = AttachConfig()
    cluster: ClusterConfig = ClusterConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    peers: PeerConfig = PeerConfig()
    dynamo: DynamoConfig = DynamoConfig()
    openai: OpenAiConfig = OpenAiConfig()
    picker: PickerConfig = PickerConfig()

    @property
    def router_id(self) -> int:
        """The router's id, made from name and port, so that it survives restarts."""
        return id_of_name(f"{self.service.name}:{self.http.http_port}")

    @property
    def shares_reservations(self) -> bool:
        """True if other routers receive this router's bookings; a shadow's are those of another."""
        has_others = bool(self.bus.nats_url) or self.peers.are_set
        return self.reservations.router_replica_sync and has_others and not self.dynamo.shadow

    @property
    def naming(self) -> "HashKeying":
        """The naming of blocks, in caches and in bookings. Raises ConfigError."""
        from router.sequence.hashing.keyed_hashes import HashKeying

        return HashKeying(self.block_keys.read(), self.placement.tracking_key)

    @property
    def index_settings(self) -> "IndexSettings":
        """The settings of the index."""
        return structs.replace(
            self.index.settings,
            overlap_score_weight=self.policy.overlap_score_weight,
            use_kv_events=self.estimates.use_kv_events,
        )

    def unused(self, selectors: Sequence["Selector"]) -> dict[str, str]:
        """Return the settings of decisions that were set without effect, with sentences.

        `selectors`: the available policies.
        """
        of_queue = self.queue.unused(self.policy.in_force(selectors), selectors)
        return self.policy.unused(selectors) | of_queue

    @property
    def core(self) -> "CoreSettings":
        """The settings of decisions."""
        from router.core.fleet import LivenessLimits
        from router.core.settings import CoreSettings
        from router.indexer.factory import index_mode

        placement, mode = self.placement, index_mode(self.index_settings)
        return CoreSettings(
            router_id=self.router_id,
            policy=self.policy.settings(tracks_prefill=placement.router_track_prefill_tokens),
            liveness=LivenessLimits(silence_s=self.service.worker_silence_s),
            reservation_ttl_s=self.reservations.reservation_ttl_s,
            max_reservations=self.reservations.max_reservations,
            mode=mode,
            estimates=self.estimates.limits(mode),
            tracking=placement.tracking,
            gate=placement.gate(is_affinity_hard=self.sessions.is_hard),
            default_policy=self.policy.policy,
            group_policies=self.policy.policies_by_group,
            queueing=self.queue.queueing,
            naming=self.naming,
            models_prefill=placement.router_prefill_load_model == "ais",
            capacity=self.capacity.settings,
        )


DECISION_SETTINGS = tuple(
    each.name for each in settings_of(RouterConfig()) if each.has_mark(DECIDES)
)
"""The settings on which the decisions of a router depend; `event_threads` is not one of them."""
