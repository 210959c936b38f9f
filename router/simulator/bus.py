"""Messages between simulated workers and routers, each delivered after its lag."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

from router.core.commands import (
    Apply,
    ApplyLoad,
    ApplyPolled,
    ApplySlice,
    MarkBeacon,
    SetConnected,
    Tick,
    Tidy,
    UpsertRegistered,
    UpsertWorker,
)
from router.core.core import RouterCore
from router.core.effects import (
    AdmitWaiting,
    Effect,
    FetchWorker,
    RefuseWaiting,
    RequestCheckpoint,
    SendBeacon,
    TellReplica,
)
from router.core.registered_workers import RegisteredWorker
from router.protocol.events import LogMessage
from router.protocol.loads import Beacon, LoadReport, PolledLoad
from router.simulator.agenda import EventQueue
from router.simulator.peers import SimulatedPeers
from router.simulator.scenario import Scenario
from router.simulator.simulated_worker import SimulatedWorker

Attend: TypeAlias = Callable[[RouterCore, AdmitWaiting | RefuseWaiting], None]

TICK_S = 0.2
"""The interval at which routers tick and send beacons."""


class Bus:
    """The message bus of all workers and routers; messages sent at once arrive in order."""

    __slots__ = (
        "_agenda",
        "_attend",
        "_beacon_ids",
        "_cores",
        "_peers",
        "_rng",
        "_scenario",
        "_workers",
    )

    def __init__(
        self,
        agenda: EventQueue,
        scenario: Scenario,
        cores: Sequence[RouterCore],
        workers: Sequence[SimulatedWorker],
        rng: Random,
    ) -> None:
        """Set up the bus; `rng` decides which reports are lost."""
        self._rng = rng
        self._agenda = agenda
        self._scenario = scenario
        self._cores = cores
        self._workers = workers
        self._beacon_ids: dict[int, int] = {}
        self._peers = SimulatedPeers(agenda, cores, scenario.sync_lag_s)
        self._attend: Attend | None = None

    def on_waiting(self, attend: Attend) -> None:
        """Set the handler of effects about waiting requests."""
        self._attend = attend

    def begin(self) -> None:
        """Announce all workers with their first reports, and start periodic reports and ticks."""
        interval_s = self._scenario.report_interval_s
        for core in self._cores:
            core.handle(SetConnected(True), 0.0)
        for worker in self._workers:
            self.introduce(worker)
            phase = (worker.worker_id + 1) / len(self._workers)
            self._agenda.after(interval_s * phase, self._report, worker)
        self._agenda.after(TICK_S, self._tick)

    def introduce(self, worker: SimulatedWorker) -> None:
        """Announce a worker's new incarnation and deliver its first report at once."""
        messages = worker.take_messages()
        report = worker.report(self._beacon_ids, self._agenda.now_s)
        for core in self._cores:
            self._announce(core, worker)
            self._deliver(core, messages)
            self._deliver_report(core, report)

    def _announce(self, core: RouterCore, worker: SimulatedWorker) -> None:
        announcement = worker.announcement
        if isinstance(announcement, RegisteredWorker):
            core.handle(UpsertRegistered(announcement), self._agenda.now_s)
        else:
            core.handle(UpsertWorker(announcement), self._agenda.now_s)

    def publish(self, worker: SimulatedWorker) -> None:
        """Send a worker's pending cache events, if any."""
        messages = worker.take_messages()
        if messages:
            for core in self._cores:
                self._agenda.after(self._scenario.event_lag_s, self._deliver, core, messages)

    def perform(self, core: RouterCore, effects: Sequence[Effect]) -> None:
        """Execute the effects of a router's command, and publish its bookings to its peers."""
        for effect in effects:
            if isinstance(effect, RequestCheckpoint):
                worker = self._workers[effect.rank.worker_id]
                worker.require_checkpoint()
                self.publish(worker)
            elif isinstance(effect, FetchWorker):
                worker = self._workers[effect.worker_id]
                if worker.engine is not None:
                    self._announce(core, worker)
            elif isinstance(effect, SendBeacon):
                self._agenda.after(self._scenario.event_lag_s, self._receive, effect.beacon)
            elif isinstance(effect, TellReplica):
                self._peers.send(core, effect)
            elif isinstance(effect, AdmitWaiting | RefuseWaiting) and self._attend is not None:
                self._attend(core, effect)
        self._peers.stir(core)

    def _receive(self, beacon: Beacon) -> None:
        self._beacon_ids[beacon.source_id] = beacon.beacon_id

    def _deliver(self, core: RouterCore, messages: Sequence[LogMessage]) -> None:
        for message in messages:
            core.handle(Apply(message), self._agenda.now_s)
            while core.handle(ApplySlice(), 0.0)[0]:
                pass

    def _report(self, worker: SimulatedWorker) -> None:
        self._agenda.after(self._scenario.report_interval_s, self._report, worker)
        if worker.engine is None:
            return
        loads = self._scenario.loads
        report = worker.report(self._beacon_ids, self._agenda.now_s)
        polled = worker.poll(self._agenda.now_s) if loads.source == "polled" else None
        if loads.lost and self._rng.random() < loads.lost:
            return
        for core in self._cores:
            self._agenda.after(self._scenario.report_lag_s, self._deliver_report, core, report)
            if polled is not None:
                self._agenda.after(self._scenario.report_lag_s, self._deliver_poll, core, polled)

    def _deliver_report(self, core: RouterCore, report: LoadReport) -> None:
        self.perform(core, core.handle(ApplyLoad(report), self._agenda.now_s)[1])

    def _deliver_poll(self, core: RouterCore, polled: PolledLoad) -> None:
        core.handle(ApplyPolled(polled), self._agenda.now_s)

    def _tick(self) -> None:
        now_s = self._agenda.now_s
        self._agenda.after(TICK_S, self._tick)
        for core in self._cores:
            self.perform(
                core, [*core.handle(Tick(), now_s)[1], *core.handle(MarkBeacon(), now_s)[1]]
            )
            while core.handle(Tidy(), now_s)[0]:
                pass
