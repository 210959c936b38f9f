"""Workers that callers register: nobody announces them, this process hears their engines itself.

    WorkerRegistration ─ complete ─▶ RegisteredWorker, in the core's fleet beside announced ones
                       └ something missing ─▶ kept here, and shown with what it lacks

A later announcement of the same id takes a registered worker's place: it knows itself better.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from msgspec.structs import replace
from sortedcontainers import SortedDict

from router.core import RouterCore
from router.effects import Effect
from router.errors import WorkerNotFoundError
from router.heard import HeardWorker
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import SCHEME, Identity, Rank
from router.protocol.workers import EngineSource, WorkerRegistration
from router.registration_errors import (
    AnnouncedWorkerError,
    DoubledEndpointError,
    TooManyRegistrationsError,
)


class RegisteredWorker(WorkerAnnouncement, frozen=True, kw_only=True):
    """A complete registration. It has any ranks, and promises no reports.

    `sources`: where the engines of its ranks are heard, by `dp_rank`; of those that are not here,
    events come over the bus.
    """

    reports_load: ClassVar[bool] = False
    registration: WorkerRegistration
    dp_ranks: tuple[int, ...]
    sources: dict[int, EngineSource]

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The registered ranks, in order; there may be gaps."""
        return tuple(Rank(self.worker_id, dp_rank) for dp_rank in self.dp_ranks)

    @property
    def rank_count(self) -> int:
        """How many they are. O(1)."""
        return len(self.dp_ranks)

    def source(self, rank: Rank) -> EngineSource | None:
        """Where the rank's engine is heard; None: over the bus."""
        return self.sources.get(rank.dp_rank)


class Registrations:
    """All of them, complete or not. The complete ones live in the core."""

    __slots__ = ("_core", "_incomplete", "_max_ranks")

    def __init__(self, core: RouterCore, max_ranks: int) -> None:
        self._core = core
        self._max_ranks = max_ranks
        self._incomplete: SortedDict = SortedDict()

    def __iter__(self) -> Iterator[WorkerRegistration]:
        """In no order."""
        yield from self._incomplete.values()
        yield from (worker.registration for worker in self.complete())

    @property
    def rank_count(self) -> int:
        """Ranks registered, those of incomplete workers included. O(workers)."""
        incomplete = sum(map(_room, self._incomplete.values()))
        return incomplete + sum(len(worker.dp_ranks) for worker in self.complete())

    @property
    def max_ranks(self) -> int:
        """The limit on them."""
        return self._max_ranks

    @property
    def incomplete(self) -> Iterable[WorkerRegistration]:
        """Those that lack something, by id."""
        incomplete: Iterable[WorkerRegistration] = self._incomplete.values()
        return incomplete

    def complete(self) -> Iterator[RegisteredWorker]:
        """Those that lack nothing, by id. O(workers)."""
        announced = (worker.announcement for worker in self._core.fleet)
        return (each for each in announced if isinstance(each, RegisteredWorker))

    def get(self, worker_id: int) -> WorkerRegistration:
        """A registration. Raises WorkerNotFoundError, AnnouncedWorkerError."""
        incomplete: WorkerRegistration | None = self._incomplete.get(worker_id)
        if incomplete is not None:
            return incomplete
        worker = self._core.fleet.get(worker_id)
        if worker is None:
            raise WorkerNotFoundError(worker_id)
        if not isinstance(worker.announcement, RegisteredWorker):
            raise AnnouncedWorkerError(worker_id)
        return worker.announcement.registration

    def put(self, worker: RegisteredWorker, now_s: float) -> None:
        """Add or replace a worker that lacks nothing; what stays the same goes on. O(workers).

        Raises AnnouncedWorkerError, DoubledEndpointError, TooManyRegistrationsError; then nothing
        has changed.
        """
        self._check(worker.worker_id, len(worker.dp_ranks))
        self._check_sockets(worker)
        identity = replace(worker.identity, scheme=self._core.naming.scheme)
        worker = replace(worker, identity=identity)  # whoever is heard here is named as here
        self._incomplete.pop(worker.worker_id, None)
        self._core.upsert_worker(worker, now_s)

    def put_incomplete(self, registration: WorkerRegistration) -> list[Effect]:
        """Add or replace a worker that lacks something; nobody can be sent to it. O(workers).

        Raises AnnouncedWorkerError, TooManyRegistrationsError; then nothing has changed.
        """
        worker_id = registration.worker_id
        self._check(worker_id, _room(registration))
        self._incomplete[worker_id] = registration
        return self._core.remove_worker(worker_id, "incomplete")

    def remove(self, worker_id: int) -> list[Effect]:
        """Forget a worker; one that is only heard comes back when it is heard again.

        Raises WorkerNotFoundError, AnnouncedWorkerError.
        """
        worker = self._core.fleet.get(worker_id)
        if worker is None or not isinstance(worker.announcement, HeardWorker):
            self.get(worker_id)
        self._incomplete.pop(worker_id, None)
        return self._core.remove_worker(worker_id, "unregistered")

    def incarnation(self, worker_id: int, fresh: int) -> int:
        """That of the registered worker of this id, so that what stays the same goes on; or this
        fresh one.
        """
        worker = self._core.fleet.get(worker_id)
        is_registered = worker is not None and isinstance(worker.announcement, RegisteredWorker)
        return worker.announcement.incarnation if worker and is_registered else fresh

    def _check(self, worker_id: int, ranks: int) -> None:
        worker = self._core.fleet.get(worker_id)
        known = None if worker is None else worker.announcement
        if known is not None and not isinstance(known, RegisteredWorker):
            raise AnnouncedWorkerError(worker_id)
        incomplete = self._incomplete.get(worker_id)
        before = (len(known.dp_ranks) if known else 0) + (_room(incomplete) if incomplete else 0)
        if self.rank_count - before + ranks > self._max_ranks:
            raise TooManyRegistrationsError(self._max_ranks)

    def _check_sockets(self, worker: RegisteredWorker) -> None:
        taken: dict[str, Rank] = {}
        for other in self.complete():
            if other.scope == worker.scope and other.worker_id != worker.worker_id:
                taken.update((socket, rank) for rank, _, socket in _sockets(other))
        for rank, field, socket in _sockets(worker):
            if socket in taken:
                raise DoubledEndpointError(field, socket, taken[socket])
            taken[socket] = rank


def missing(registration: WorkerRegistration, *, needs_events: bool) -> list[str]:
    """What a worker lacks to be chosen; the sentences of the peer are its own, word for word."""
    lacking = []
    if not registration.endpoint:
        lacking.append("endpoint is required")
    if not registration.block_size:
        lacking.append("block_size must be greater than 0")
    if not registration.dp_ranks:
        lacking.append("data_parallel_size must be greater than 0")
    return [*lacking, *_missing_sockets(registration)] if needs_events else lacking


def registered_worker(
    registration: WorkerRegistration,
    dp_ranks: Iterable[int],
    sources: dict[int, EngineSource],
    incarnation: int,
) -> RegisteredWorker:
    """A registration that lacks nothing, as the core takes it. Capacity that nobody said is 0."""
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
        registration=registration,
        dp_ranks=tuple(dp_ranks),
        sources=sources,
    )


def complete_worker(
    registration: WorkerRegistration, incarnation: int, *, needs_events: bool
) -> RegisteredWorker | None:
    """A worker to be chosen, as registered; None if something is missing."""
    if missing(registration, needs_events=needs_events):
        return None
    sources = sources_of(registration, registration.dp_ranks)
    return registered_worker(registration, registration.dp_ranks, sources, incarnation)


def sources_of(
    registration: WorkerRegistration, dp_ranks: Iterable[int]
) -> dict[int, EngineSource]:
    """Where the engines of these ranks are heard; of those nobody said it, nowhere."""
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
        )
        for dp_rank in dp_ranks
        if dp_rank in events
    }


def _room(incomplete: WorkerRegistration) -> int:
    """Ranks that an incomplete worker counts for: even without any it takes room."""
    return max(len(incomplete.dp_ranks), 1)


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


def _sockets(worker: RegisteredWorker) -> Iterator[tuple[Rank, str, str]]:
    """Rank, field and endpoint of each socket."""
    for rank in worker.ranks:
        source = worker.source(rank)
        if source is not None:
            yield rank, f"kv_events_endpoints.{rank.dp_rank}", source.events
            if source.replay is not None:
                yield rank, f"replay_endpoints.{rank.dp_rank}", source.replay
