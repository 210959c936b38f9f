"""The known workers: their announcements, their load reports, and how long they have been silent.

Routers send beacons, and load reports return them, so that clocks need not agree: a report that
carries a beacon was made after the beacon was sent, and the sender knows when that was. Ids are
random, so that no process takes the beacon of another process, or of an earlier run, for its own.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from random import Random
from types import MappingProxyType

from msgspec import Struct
from sortedcontainers import SortedDict

from router.protocol.catalogue import Lifecycle, WorkerAnnouncement
from router.protocol.loads import Beacon, LoadGauges, LoadReport, PolledLoad
from router.protocol.values import Identity, Rank, Scope

REMEMBERED = 64

POLL_STALE_S = 5.0
"""The age at which a polled load is not current any more."""

NO_SCOPES: Mapping[Scope, "ScopeRanks"] = MappingProxyType({})


class Beacons:
    """The beacons that this process has sent."""

    __slots__ = ("_rng", "_sent_s", "_source_id")

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._source_id = rng.getrandbits(53)
        self._sent_s: OrderedDict[int, float] = OrderedDict()

    def next(self, now_s: float) -> Beacon:
        """Return a beacon to send now."""
        beacon = Beacon(self._source_id, self._rng.getrandbits(53))
        self._sent_s[beacon.beacon_id] = now_s
        if len(self._sent_s) > REMEMBERED:
            self._sent_s.popitem(last=False)
        return beacon

    def fresh_at_s(self, report: LoadReport) -> float | None:
        """Return the time up to which the report and the log are complete.

        All that happened before is in the report, or in the log before it. Returns None if the
        report proves no time.
        """
        sent_s = self._sent_s.get(report.heard.get(self._source_id, -1))
        return None if sent_s is None else sent_s - report.waiting_s


class LivenessLimits(Struct, frozen=True):
    """The limits of silence, in seconds."""

    silence_s: float = 2.5
    heartbeat_s: float = 1.0
    freeze_s: float = 30.0


class FleetWorker:
    """One worker: its announcement, its last reports, and when it last reported.

    `ranks`: those of its announcement. `problem`: a reason seen by this process why the worker is
    not schedulable; `is_unreachable`: it never answered anywhere. `caution`: a reason why its
    events may mean something else than they seem to. `polled`: the last load of ranks without an
    agent, and its time.
    """

    __slots__ = (
        "announcement",
        "caution",
        "is_unreachable",
        "last_seen_s",
        "polled",
        "problem",
        "ranks",
        "reported_s",
        "reports",
        "was_seen",
    )

    def __init__(self, announcement: WorkerAnnouncement, now_s: float) -> None:
        self.announcement = announcement
        self.ranks = announcement.ranks
        self.last_seen_s = now_s
        self.was_seen = False
        self.problem: str | None = None
        self.is_unreachable = False
        self.caution: str | None = None
        self.polled: dict[Rank, tuple[PolledLoad, float]] = {}
        self.reports: dict[Rank, LoadReport] = {}
        self.reported_s: dict[Rank, float] = {}

    def announce(self, announcement: WorkerAnnouncement) -> None:
        """Replace the announcement; reports of ranks that are not in it are dropped."""
        self.announcement = announcement
        self.ranks = announcement.ranks
        self.reports = {rank: self.reports[rank] for rank in self.ranks if rank in self.reports}
        self.polled = {rank: self.polled[rank] for rank in self.ranks if rank in self.polled}

    def was_made_since(self, rank: Rank, made_after_s: float | None) -> bool:
        """Return whether a report made after that time is not older than the rank's last one."""
        return made_after_s is not None and made_after_s > self.reported_s[rank]

    def most_running(self, rank: Rank) -> int:
        """Return the limit of requests that a rank's engine runs at once; 0 if not reported."""
        polled, report = self.polled.get(rank), self.reports.get(rank)
        limit = 0 if polled is None else polled[0].constants.max_running_requests
        return limit or (0 if report is None else report.constants.max_running_requests)

    @property
    def is_expected(self) -> bool:
        """True if its agent is its engine, and has not reported yet: it may not run at all."""
        return self.announcement.agent_is_engine and not self.was_seen


class ScopeRanks(Struct, frozen=True):
    """The announced ranks of a scope, by worker and rank.

    `worker_ids`, `dp_ranks`, `block_sizes`: of each rank. `places`: the position of each rank.
    `identities`: those of the workers, each once, in order; `kinds`: the position in them of each
    rank's identity. `unschedulable`: the workers that are not.
    """

    schedulable: list[WorkerAnnouncement] = []
    unschedulable: list[FleetWorker] = []
    ranks: list[Rank] = []
    worker_ids: list[int] = []
    dp_ranks: list[int] = []
    block_sizes: list[int] = []
    places: dict[Rank, int] = {}
    identities: list[Identity] = []
    kinds: list[int] = []

    def add(self, worker: FleetWorker, *, is_schedulable: bool) -> None:
        """Add the ranks of the next worker."""
        identity = worker.announcement.identity
        if identity not in self.identities:
            self.identities.append(identity)
        kind = self.identities.index(identity)
        if is_schedulable:
            self.schedulable.append(worker.announcement)
        else:
            self.unschedulable.append(worker)
        for rank in worker.ranks:
            self.places[rank] = len(self.ranks)
            self.ranks.append(rank)
            self.worker_ids.append(rank.worker_id)
            self.dp_ranks.append(rank.dp_rank)
            self.block_sizes.append(identity.block_size)
            self.kinds.append(kind)


class Fleet:
    """All workers of the namespace, by id, and the operators' orders about them.

    Orders outlive workers: a cordoned worker that restarts is still cordoned. `stale_reports`: the
    number of reports that were duplicates or too late. `version` counts changes of announcements,
    and of the set of schedulable workers. `is_connected`: this process is connected to the bus.
    `faulty`: ids of workers with a problem or a caution. `get` returns a worker by id, or None.

    Invariant: `_schedulable` has the ids of the schedulable workers.
    """

    __slots__ = (
        "_frozen_since_s",
        "_limits",
        "_orders",
        "_schedulable",
        "_scopes",
        "_workers",
        "faulty",
        "get",
        "is_connected",
        "stale_reports",
        "version",
    )

    def __init__(self, limits: LivenessLimits) -> None:
        self._limits = limits
        self._workers: SortedDict = SortedDict()
        self.get: Callable[[int], FleetWorker | None] = self._workers.get
        self.faulty: set[int] = set()
        self._orders: dict[int, Lifecycle] = {}
        self._schedulable: set[int] = set()
        self._scopes: tuple[int, Mapping[Scope, ScopeRanks]] = 0, NO_SCOPES
        self.is_connected = False
        self._frozen_since_s: float | None = None
        self.stale_reports = 0
        self.version = 0

    def __iter__(self) -> Iterator[FleetWorker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def put(self, announcement: WorkerAnnouncement, now_s: float) -> None:
        """Add a worker, or update its announcement."""
        worker_id = announcement.worker_id
        known = self.get(worker_id)
        if known is None or known.announcement.incarnation != announcement.incarnation:
            self._workers[worker_id] = FleetWorker(announcement, now_s)
        elif known.announcement != announcement:
            known.announce(announcement)
        else:
            return
        self._note_change(worker_id)

    def remove(self, worker_id: int) -> None:
        """Remove a worker, but not the orders about it."""
        self._workers.pop(worker_id, None)
        self._note_change(worker_id)

    def expects(self, report: LoadReport) -> bool:
        """Return whether this rank was announced by the agent that reports on it."""
        worker = self.get(report.worker_id)
        if worker is None or report.agent_incarnation != worker.announcement.incarnation:
            return False
        return report.rank in worker.announcement.ranks

    def record_report(
        self, report: LoadReport, now_s: float, made_after_s: float | None = None
    ) -> bool:
        """Record an expected load report. Returns False, and counts it, if it is stale.

        A stale report is older than the last one. `made_after_s`: a time after which it was
        certainly made. A report made after the last one arrived is not stale, whatever its number;
        else one wrong number would silence a rank for the life of its agent.
        """
        worker = self._workers[report.worker_id]
        known = worker.reports.get(report.rank)
        is_old = known is not None and report.report_id <= known.report_id
        if is_old and not worker.was_made_since(report.rank, made_after_s):
            self.stale_reports += 1
            return False
        worker.last_seen_s = now_s
        if not worker.was_seen:
            worker.was_seen = True
            self._note_change(report.worker_id)
        worker.reports[report.rank] = report
        worker.reported_s[report.rank] = now_s
        return True

    def record_polled(self, report: PolledLoad, now_s: float) -> bool:
        """Record the load of a rank without an agent. Returns False for any other rank."""
        worker = self.get(report.worker_id)
        if worker is None or worker.announcement.reports_load or report.rank not in worker.ranks:
            return False
        worker.polled[report.rank] = report, now_s
        return True

    def gauges(self, rank: Rank, now_s: float) -> LoadGauges | None:
        """Return a rank's gauges by its last report, if it is current."""
        worker = self.get(rank.worker_id)
        if worker is None:
            return None
        polled = worker.polled.get(rank)
        if polled is not None and now_s - polled[1] <= POLL_STALE_S:
            return polled[0].gauges
        report = worker.reports.get(rank)
        if report is None or self.silence_s(worker, now_s) is not None:
            return None
        return report.gauges

    def order(self, worker_id: int, lifecycle: Lifecycle | None) -> None:
        """Set an operator's order for a worker; None clears it."""
        if lifecycle is None or lifecycle == "schedulable":
            self._orders.pop(worker_id, None)
        else:
            self._orders[worker_id] = lifecycle
        self._note_change(worker_id)

    def set_problem(
        self, worker_id: int, problem: str | None, *, is_unreachable: bool = False
    ) -> None:
        """Set the reason why a worker is not schedulable; None clears it. Ignores unknown ones."""
        worker = self.get(worker_id)
        if worker is not None and worker.problem != problem:
            worker.problem, worker.is_unreachable = problem, is_unreachable
            self._note_change(worker_id)

    def set_caution(self, worker: FleetWorker, caution: str | None) -> None:
        """Set the reason to trust a worker's events less than they claim; None clears it."""
        worker.caution = caution
        self._note_fault(worker.announcement.worker_id)

    def lifecycle(self, worker_id: int) -> Lifecycle:
        """Return the lifecycle of a worker, as operators ordered it."""
        return self._orders.get(worker_id, "schedulable")

    @property
    def orders(self) -> Mapping[int, Lifecycle]:
        """Operators' orders, by worker."""
        return self._orders

    def is_schedulable(self, worker: FleetWorker) -> bool:
        """Return whether new requests may be sent to a worker."""
        return self.obstacle(worker) is None

    def obstacle(self, worker: FleetWorker) -> str | None:
        """Return the reason why a worker is not schedulable. Returns None if it is."""
        wanted = self.lifecycle(worker.announcement.worker_id)
        if wanted != "schedulable":
            return wanted
        return "no load report yet" if worker.is_expected else worker.problem

    def scopes(self) -> Mapping[Scope, ScopeRanks]:
        """Return the ranks of each scope that has workers. O(1) while no worker has changed."""
        version, scopes = self._scopes
        if version == self.version:
            return scopes
        found: dict[Scope, ScopeRanks] = {}
        for worker in self:
            scope = worker.announcement.scope
            if scope not in found:
                found[scope] = ScopeRanks()
            found[scope].add(worker, is_schedulable=self.is_schedulable(worker))
        self._scopes = self.version, found
        return found

    def schedulable(self, scope: Scope) -> list[WorkerAnnouncement]:
        """Return the schedulable workers of a scope, by id."""
        here = self.scopes().get(scope)
        return [] if here is None else here.schedulable

    def schedulable_count(self) -> int:
        """Return the number of schedulable workers, in any scope. O(1)."""
        return len(self._schedulable)

    def used_blocks(self, rank: Rank, now_s: float) -> int:
        """Return the blocks in use by its engine's last report; 0 without a current report."""
        gauges = self.gauges(rank, now_s)
        return 0 if gauges is None else gauges.kv_used_blocks

    def silence_s(self, worker: FleetWorker, now_s: float) -> float | None:
        """Return the time since a worker's last report, if over the limit.

        Returns None up to the limit, for a worker that sends no reports, and while this process is
        not connected.
        """
        silence_s = now_s - worker.last_seen_s
        if silence_s <= self._limits.silence_s or not self.is_connected:
            return None
        return silence_s if worker.announcement.reports_load else None

    @property
    def is_frozen(self) -> bool:
        """True while most workers are silent together, so that none of them is removed."""
        return self._frozen_since_s is not None

    def set_connected(self, connected: bool, now_s: float) -> None:
        """Record whether there is a connection; a new one restarts the timeout of every worker."""
        if connected and not self.is_connected:
            for worker in self._workers.values():
                worker.last_seen_s = now_s
        self.is_connected = connected

    def take_gone(self, now_s: float) -> list[WorkerAnnouncement]:
        """Remove and return the workers that are lost, by their silence."""
        if not self.is_connected:
            return []
        silent = [w for w in self if self.silence_s(w, now_s) is not None]
        if self._is_mass_silence(silent, now_s):
            silent = [w for w in silent if w.is_expected]
        gone = [w.announcement for w in silent if w.announcement.agent_is_engine]
        for announcement in gone:
            self.remove(announcement.worker_id)
        return gone

    def _note_change(self, worker_id: int) -> None:
        """Count a change of a worker, which may have been removed."""
        self.version += 1
        worker = self.get(worker_id)
        if worker is not None and self.is_schedulable(worker):
            self._schedulable.add(worker_id)
        else:
            self._schedulable.discard(worker_id)
        self._note_fault(worker_id)

    def _note_fault(self, worker_id: int) -> None:
        worker = self.get(worker_id)
        if worker is not None and (worker.problem is not None or worker.caution is not None):
            self.faulty.add(worker_id)
        else:
            self.faulty.discard(worker_id)

    def _is_mass_silence(self, silent: list[FleetWorker], now_s: float) -> bool:
        """Return whether most workers fell silent within one heartbeat, which is no sign of loss.

        Workers without load reports do not count.
        """
        late_s = self._limits.silence_s - self._limits.heartbeat_s
        reporting = [w for w in self if w.was_seen and w.announcement.reports_load]
        late = [w for w in reporting if now_s - w.last_seen_s > late_s]
        if not silent or len(late) < 2 or 2 * len(late) <= len(reporting):
            self._frozen_since_s = None
            return False
        if self._frozen_since_s is None:
            self._frozen_since_s = now_s
        return now_s - self._frozen_since_s < self._limits.freeze_s
