"""Who exists, who may be chosen, and who has fallen silent.

A worker is known from its announcement on, and alive while its load reports arrive. An agent that
is its own engine and silent past the limit is gone. Beside a live engine a silent agent only makes
its worker blind: it stays schedulable. Silence means little when it may be ours: while our
connection is down, or when most workers fall silent together, nobody is declared gone (the latter
for a bounded time).
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct
from sortedcontainers import SortedDict

from router.protocol.catalogue import Lifecycle, WorkerAnnouncement
from router.protocol.loads import LoadReport
from router.protocol.values import Rank, Scope


class LivenessLimits(Struct, frozen=True):
    """When silence counts, in seconds."""

    silence_s: float = 2.5
    heartbeat_s: float = 1.0
    freeze_s: float = 30.0


class Worker:
    """One worker: what it announced, and when and with what it was last heard. `problem`: what
    this process sees that keeps anybody from being sent there.
    """

    __slots__ = ("announcement", "heard_s", "problem", "reported_s", "reports", "was_heard")

    def __init__(self, announcement: WorkerAnnouncement, now_s: float) -> None:
        self.announcement = announcement
        self.heard_s = now_s
        self.was_heard = False
        self.problem: str | None = None
        self.reports: dict[Rank, LoadReport] = {}
        self.reported_s: dict[Rank, float] = {}

    def was_made_since(self, rank: Rank, made_after_s: float | None) -> bool:
        """Whether a report of that time is certainly not older than the last of this rank."""
        return made_after_s is not None and made_after_s > self.reported_s[rank]

    @property
    def is_expected(self) -> bool:
        """Its agent is its engine, and has not been heard yet: nobody knows that it runs."""
        return self.announcement.agent_is_engine and not self.was_heard


class Fleet:
    """All workers of the namespace, by id, and the operators' orders about them.

    Orders outlive workers: a cordoned worker that restarts is still cordoned. `stale_reports`: how
    many came doubled or too late. `version` counts changes of who may be chosen.
    """

    __slots__ = (
        "_connected",
        "_frozen_since_s",
        "_limits",
        "_orders",
        "_workers",
        "stale_reports",
        "version",
    )

    def __init__(self, limits: LivenessLimits) -> None:
        self._limits = limits
        self._workers: SortedDict = SortedDict()
        self._orders: dict[int, Lifecycle] = {}
        self._connected = False
        self._frozen_since_s: float | None = None
        self.stale_reports = 0
        self.version = 0

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: int) -> Worker | None:
        """A worker by id."""
        worker: Worker | None = self._workers.get(worker_id)
        return worker

    def put(self, announcement: WorkerAnnouncement, now_s: float) -> None:
        """Add a worker, or note what it announces now."""
        known = self.get(announcement.worker_id)
        if known is None or known.announcement != announcement:
            self.version += 1
        if known is None or known.announcement.incarnation != announcement.incarnation:
            self._workers[announcement.worker_id] = Worker(announcement, now_s)
            return
        known.announcement = announcement
        known.reports = {r: known.reports[r] for r in announcement.ranks if r in known.reports}

    def remove(self, worker_id: int) -> None:
        """Forget a worker, but not the orders about it."""
        self._workers.pop(worker_id, None)
        self.version += 1

    def expects(self, report: LoadReport) -> bool:
        """Whether this rank was announced by the agent that reports on it."""
        worker = self.get(report.worker_id)
        if worker is None or report.agent_incarnation != worker.announcement.incarnation:
            return False
        return report.rank in worker.announcement.ranks

    def hear(self, report: LoadReport, now_s: float, made_after_s: float | None = None) -> bool:
        """Note an expected load report; False, and a count, for one that is older than the last.

        `made_after_s`: when it was certainly not made yet. One from after the last is no older,
        whatever its number: or one wrong number would silence a rank for its agent's life.
        """
        worker = self._workers[report.worker_id]
        known = worker.reports.get(report.rank)
        is_old = known is not None and report.report_id <= known.report_id
        if is_old and not worker.was_made_since(report.rank, made_after_s):
            self.stale_reports += 1
            return False
        self.version += not worker.was_heard
        worker.heard_s = now_s
        worker.was_heard = True
        worker.reports[report.rank] = report
        worker.reported_s[report.rank] = now_s
        return True

    def order(self, worker_id: int, lifecycle: Lifecycle | None) -> None:
        """Note what operators want of a worker; None: nothing special."""
        if lifecycle is None or lifecycle == "schedulable":
            self._orders.pop(worker_id, None)
        else:
            self._orders[worker_id] = lifecycle
        self.version += 1

    def set_problem(self, worker_id: int, problem: str | None) -> None:
        """Note what keeps anybody from being sent to a worker; unknown ones are passed over."""
        worker = self.get(worker_id)
        if worker is not None and worker.problem != problem:
            worker.problem = problem
            self.version += 1

    def lifecycle(self, worker_id: int) -> Lifecycle:
        """What operators want of a worker."""
        return self._orders.get(worker_id, "schedulable")

    @property
    def orders(self) -> Mapping[int, Lifecycle]:
        """Operators' orders, by worker."""
        return self._orders

    def is_schedulable(self, worker: Worker) -> bool:
        """May new requests go there?"""
        return self.obstacle(worker) is None

    def obstacle(self, worker: Worker) -> str | None:
        """Why new requests may not go there; None: they may."""
        wanted = self.lifecycle(worker.announcement.worker_id)
        if wanted != "schedulable":
            return wanted
        return "not heard yet" if worker.is_expected else worker.problem

    def schedulable(self, scope: Scope) -> list[WorkerAnnouncement]:
        """Workers of a scope that may be chosen, by id."""
        return [
            worker.announcement
            for worker in self
            if worker.announcement.scope == scope and self.is_schedulable(worker)
        ]

    def schedulable_count(self) -> int:
        """Workers that may be chosen, in any scope."""
        return sum(self.is_schedulable(worker) for worker in self)

    def used_blocks(self, rank: Rank, now_s: float) -> int:
        """Blocks in use by its engine's last report; 0 for want of one that still counts."""
        worker = self.get(rank.worker_id)
        report = None if worker is None else worker.reports.get(rank)
        if worker is None or report is None or self.silence_s(worker, now_s) is not None:
            return 0
        return report.gauges.kv_used_blocks

    def silence_s(self, worker: Worker, now_s: float) -> float | None:
        """How long a worker has been silent that reports; None up to the limit, or while we are
        deaf.
        """
        if not (self._connected and worker.announcement.reports_load):
            return None
        silent_s = now_s - worker.heard_s
        return silent_s if silent_s > self._limits.silence_s else None

    @property
    def is_connected(self) -> bool:
        """Whether we can hear anybody at all."""
        return self._connected

    @property
    def is_frozen(self) -> bool:
        """Most workers fell silent together, so that for now none of them counts as gone."""
        return self._frozen_since_s is not None

    def set_connected(self, connected: bool, now_s: float) -> None:
        """Note whether we can hear at all; on return everybody gets time to be heard."""
        if connected and not self._connected:
            for worker in self._workers.values():
                worker.heard_s = now_s
        self._connected = connected

    def take_gone(self, now_s: float) -> list[WorkerAnnouncement]:
        """Remove and return the workers whose silence says that they are gone."""
        if not self._connected:
            return []
        silent = [w for w in self if self.silence_s(w, now_s) is not None]
        if self._is_mass_silence(silent, now_s):
            silent = [w for w in silent if w.is_expected]
        gone = [w.announcement for w in silent if w.announcement.agent_is_engine]
        for announcement in gone:
            self.remove(announcement.worker_id)
        return gone

    def _is_mass_silence(self, silent: list[Worker], now_s: float) -> bool:
        """Whoever fails together falls silent within one heartbeat of each other. Workers whose
        silence says nothing do not count.
        """
        late_s = self._limits.silence_s - self._limits.heartbeat_s
        heard = [w for w in self if w.was_heard and w.announcement.reports_load]
        late = [w for w in heard if now_s - w.heard_s > late_s]
        if not silent or len(late) < 2 or 2 * len(late) <= len(heard):
            self._frozen_since_s = None
            return False
        if self._frozen_since_s is None:
            self._frozen_since_s = now_s
        return now_s - self._frozen_since_s < self._limits.freeze_s
