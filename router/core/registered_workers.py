"""Workers that do not announce themselves: registered by callers, or found by their events."""

from collections.abc import Iterable
from typing import ClassVar

from msgspec import Struct

from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.hybrid import NO_SETTINGS
from router.protocol.values import SCHEME, Identity, Rank
from router.protocol.workers import EngineSource, WorkerRegistration


class EventSource(Struct, frozen=True):
    """The source of a rank's events: another fleet, by its address."""

    address: str


class ImplicitWorker(WorkerAnnouncement, frozen=True, kw_only=True):
    """A worker with the ranks from which events were received.

    Facts that the wire lacks come from the configuration, and its silence proves nothing for a long
    time.
    """

    reports_load: ClassVar[bool] = False
    agent_is_engine: bool = False
    dp_ranks: tuple[int, ...]
    heard_from: EventSource

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks seen so far, in order; there may be gaps."""
        return tuple(Rank(self.worker_id, dp_rank) for dp_rank in self.dp_ranks)

    def source(self, _: Rank) -> Struct | None:
        """Return the source of a rank's events, which is not the agents' bus."""
        return self.heard_from


class RegisteredWorker(WorkerAnnouncement, frozen=True, kw_only=True):
    """A complete registration. It may have any ranks, and does not have to send load reports.

    `sources`: the event sources of its ranks, by `dp_rank`; events of ranks without a source come
    over the bus, unless it `is_without_events`.
    """

    reports_load: ClassVar[bool] = False
    registration: WorkerRegistration
    dp_ranks: tuple[int, ...]
    sources: dict[int, EngineSource]
    is_without_events: bool = False

    @property
    def has_events(self) -> bool:
        """True if its ranks have events."""
        return not self.is_without_events

    @property
    def caches_prefixes(self) -> bool:
        """True unless its registration says that its engine reuses nothing."""
        return self.registration.caches_prefixes is not False

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The registered ranks, in order; there may be gaps."""
        return tuple(Rank(self.worker_id, dp_rank) for dp_rank in self.dp_ranks)

    @property
    def rank_count(self) -> int:
        """The number of ranks. O(1)."""
        return len(self.dp_ranks)

    def source(self, rank: Rank) -> EngineSource | None:
        """Return the event source of a rank. Returns None if its events come over the bus."""
        return self.sources.get(rank.dp_rank)


_SOCKETS = ("kv_events_endpoint", "kv_events_endpoints", "replay_endpoint", "replay_endpoints")


def missing(registration: WorkerRegistration) -> list[str]:
    """Return the fields that a worker lacks to be schedulable; the texts are Dynamo's.

    A worker that is complete but for event sockets, and names none, is estimated. An empty map
    promises sockets: they are missing until they are named.
    """
    lacking = []
    if not registration.endpoint:
        lacking.append("endpoint is required")
    if not registration.block_size:
        lacking.append("block_size must be greater than 0")
    if not registration.dp_ranks:
        lacking.append("data_parallel_size must be greater than 0")
    if not lacking and not _names_sockets(registration):
        return []
    return [*lacking, *_missing_sockets(registration)]


def registered_worker(
    registration: WorkerRegistration,
    dp_ranks: Iterable[int],
    sources: dict[int, EngineSource],
    incarnation: int,
    *,
    is_without_events: bool = False,
) -> RegisteredWorker:
    """Return a complete registration as the core takes it. Unset capacities are 0."""
    return RegisteredWorker(
        worker_id=registration.worker_id,
        name=f"worker {registration.worker_id}",
        model_name=registration.scope.model_name,
        routing_group=registration.scope.routing_group,
        endpoint=registration.endpoint or "",
        identity=Identity(SCHEME, registration.block_size or 1, registration.is_eagle or False),
        total_kv_blocks=registration.total_kv_blocks or 0,
        max_num_batched_tokens=registration.max_num_batched_tokens or 0,
        data_parallel_start_rank=registration.data_parallel_start_rank or 0,
        data_parallel_size=len(registration.dp_ranks) or 1,
        role=registration.role or "aggregated",
        incarnation=incarnation,
        agent_is_engine=False,
        labels=registration.labels,
        block_addresses=registration.block_addresses or {},
        registration=registration,
        dp_ranks=tuple(dp_ranks),
        sources=sources,
        is_without_events=is_without_events,
    )


def complete_worker(registration: WorkerRegistration, incarnation: int) -> RegisteredWorker | None:
    """Return a schedulable worker from its registration, or None if fields are missing."""
    if missing(registration):
        return None
    dp_ranks = registration.dp_ranks
    sources = sources_of(registration, dp_ranks)
    return registered_worker(
        registration, dp_ranks, sources, incarnation, is_without_events=not sources
    )


def sources_of(
    registration: WorkerRegistration, dp_ranks: Iterable[int]
) -> dict[int, EngineSource]:
    """Return the event sources of these ranks, without those that have no events endpoint."""
    events, replays = _events_endpoints(registration), _replay_endpoints(registration)
    loads = registration.load_endpoints or {}
    return {
        dp_rank: EngineSource(
            events[dp_rank],
            replays.get(dp_rank),
            registration.topic or "",
            loads.get(dp_rank),
            registration.engine or "vllm",
            registration.report_mode or "new",
            registration.hybrid or NO_SETTINGS,
            registration.hybrid is not None and registration.engine in ("sglang", "trtllm"),
        )
        for dp_rank in dp_ranks
        if dp_rank in events
    }


def _names_sockets(registration: WorkerRegistration) -> bool:
    given = registration.given
    return any(name in given for name in _SOCKETS)


def _missing_sockets(registration: WorkerRegistration) -> list[str]:
    events = _events_endpoints(registration)
    dp_ranks = registration.dp_ranks or range(1)
    lacking = [
        f"kv_events endpoint is required for dp_rank {dp_rank}"
        for dp_rank in dp_ranks
        if not events.get(dp_rank)
    ]
    strangers = sorted({*events, *_replay_endpoints(registration)} - {*dp_ranks})
    last = dp_ranks[-1]
    lacking += [f"dp_rank {each} is none of {dp_ranks[0]} to {last}" for each in strangers]
    if registration.replay_endpoint and len(dp_ranks) > 1:
        lacking.append(
            "replay_endpoint is supported only for data_parallel_size 1; replay_endpoints names "
            "one for each dp_rank"
        )
    return lacking


def _events_endpoints(registration: WorkerRegistration) -> dict[int, str]:
    one = registration.kv_events_endpoint
    return registration.kv_events_endpoints or _of_the_only_rank(registration, one)


def _replay_endpoints(registration: WorkerRegistration) -> dict[int, str]:
    one = registration.replay_endpoint
    return registration.replay_endpoints or _of_the_only_rank(registration, one)


def _of_the_only_rank(registration: WorkerRegistration, endpoint: str | None) -> dict[int, str]:
    dp_ranks = registration.dp_ranks
    return {dp_ranks[0]: endpoint} if endpoint and len(dp_ranks) == 1 else {}
