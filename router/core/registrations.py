"""The registrations of workers that callers have registered."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace
from sortedcontainers import SortedDict

from router.core.commands import RemoveWorker, UpsertRegistered
from router.core.core import RouterCore
from router.core.effects import Effect
from router.core.errors import AnnouncedWorkerError, DoubledEndpointError, TooManyRegistrationsError
from router.core.registered_workers import ImplicitWorker, RegisteredWorker
from router.errors import WorkerNotFoundError
from router.protocol.values import Rank
from router.protocol.workers import WorkerRegistration


class Registrations:
    """All registrations, complete or not. The complete ones are stored in the core."""

    __slots__ = ("_core", "_incomplete", "_max_ranks")

    def __init__(self, core: RouterCore, max_ranks: int) -> None:
        self._core = core
        self._max_ranks = max_ranks
        self._incomplete: SortedDict = SortedDict()

    def __iter__(self) -> Iterator[WorkerRegistration]:
        """Yield all registrations, in no particular order."""
        yield from self._incomplete.values()
        yield from (worker.registration for worker in self.complete())

    @property
    def rank_count(self) -> int:
        """Ranks registered, those of incomplete workers included. O(workers)."""
        incomplete = sum(map(_room, self._incomplete.values()))
        return incomplete + sum(len(worker.dp_ranks) for worker in self.complete())

    @property
    def max_ranks(self) -> int:
        """The limit of registered ranks."""
        return self._max_ranks

    @property
    def incomplete(self) -> Iterable[WorkerRegistration]:
        """Registrations that lack fields, by id."""
        incomplete: Iterable[WorkerRegistration] = self._incomplete.values()
        return incomplete

    def complete(self) -> Iterator[RegisteredWorker]:
        """Return the registrations that lack no field, by id. O(workers)."""
        announced = (worker.announcement for worker in self._core.fleet)
        return (each for each in announced if isinstance(each, RegisteredWorker))

    def get(self, worker_id: int) -> WorkerRegistration:
        """Return a registration. Raises WorkerNotFoundError, AnnouncedWorkerError."""
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
        """Add or replace a complete worker; unchanged ranks keep their state. O(workers).

        Raises AnnouncedWorkerError, DoubledEndpointError, TooManyRegistrationsError, without any
        change.
        """
        self._check(worker.worker_id, len(worker.dp_ranks))
        self._check_sockets(worker)
        identity = replace(worker.identity, scheme=self._core.naming.scheme)
        worker = replace(worker, identity=identity)  # hashed by this process's scheme
        self._incomplete.pop(worker.worker_id, None)
        self._core.handle(UpsertRegistered(worker), now_s)

    def put_incomplete(self, registration: WorkerRegistration) -> list[Effect]:
        """Add or replace an incomplete worker, which is not schedulable. O(workers).

        Raises AnnouncedWorkerError, TooManyRegistrationsError, without any change.
        """
        worker_id = registration.worker_id
        self._check(worker_id, _room(registration))
        self._incomplete[worker_id] = registration
        return self._core.handle(RemoveWorker(worker_id, "incomplete"), 0.0)[1]

    def remove(self, worker_id: int) -> list[Effect]:
        """Remove a worker; one known by its events alone returns with its next event.

        Raises WorkerNotFoundError, AnnouncedWorkerError.
        """
        worker = self._core.fleet.get(worker_id)
        if worker is None or not isinstance(worker.announcement, ImplicitWorker):
            self.get(worker_id)
        self._incomplete.pop(worker_id, None)
        return self._core.handle(RemoveWorker(worker_id, "unregistered"), 0.0)[1]

    def incarnation(self, worker_id: int, fresh: int) -> int:
        """Return the incarnation of a registered worker, or `fresh` if there is none.

        Unchanged ranks then keep their state.
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


def _room(incomplete: WorkerRegistration) -> int:
    """Return the ranks that an incomplete worker counts for, which is at least one."""
    return max(len(incomplete.dp_ranks), 1)


def _sockets(worker: RegisteredWorker) -> Iterator[tuple[Rank, str, str]]:
    """Yield rank, field and endpoint of each socket."""
    for rank in worker.ranks:
        source = worker.source(rank)
        if source is not None:
            yield rank, f"kv_events_endpoints.{rank.dp_rank}", source.events
            if source.replay is not None:
                yield rank, f"replay_endpoints.{rank.dp_rank}", source.replay
