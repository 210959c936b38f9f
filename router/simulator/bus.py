"""What travels between simulated workers and routers, each message after its lag."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from router.core import RouterCore
from router.effects import (
    AdmitWaiting,
    Effect,
    FetchWorker,
    RefuseWaiting,
    RequestCheckpoint,
    SendBeacon,
    TellReplica,
)
from router.protocol.events import LogMessage
from router.protocol.loads import Beacon, LoadReport
from router.simulator.agenda import Agenda
from router.simulator.peers import Peers
from router.simulator.scenario import Scenario
from router.simulator.simulated_worker import SimulatedWorker

Attend: TypeAlias = Callable[[RouterCore, AdmitWaiting | RefuseWaiting], None]

TICK_S = 0.2
"""How often routers look at what time alone brings about, and send beacons."""


class Bus:
    """Between all workers and all routers; what is sent at once is heard in the order sent."""

    __slots__ = ("_agenda", "_attend", "_cores", "_heard", "_peers", "_scenario", "_workers")

    def __init__(
        self,
        agenda: Agenda,
        scenario: Scenario,
        cores: Sequence[RouterCore],
        workers: Sequence[SimulatedWorker],
    ) -> None:
        self._agenda = agenda
        self._scenario = scenario
        self._cores = cores
        self._workers = workers
        self._heard: dict[int, int] = {}
        self._peers = Peers(agenda, cores, scenario.sync_lag_s)
        self._attend: Attend | None = None

    def on_waiting(self, attend: Attend) -> None:
        """Have somebody else look after what cores say of requests that wait."""
        self._attend = attend

    def begin(self) -> None:
        """Everybody is known, empty, and has been heard once; from now on all report and tick."""
        interval_s = self._scenario.report_interval_s
        for core in self._cores:
            core.set_connected(True, 0.0)
        for worker in self._workers:
            self.introduce(worker)
            phase = (worker.worker_id + 1) / len(self._workers)
            self._agenda.after(interval_s * phase, self._report, worker)
        self._agenda.after(TICK_S, self._tick)

    def introduce(self, worker: SimulatedWorker) -> None:
        """A worker begins a life: it is announced, and heard, at once."""
        messages = worker.take_messages()
        report = worker.report(self._heard, self._agenda.now_s)
        for core in self._cores:
            core.upsert_worker(worker.announcement, self._agenda.now_s)
            self._deliver(core, messages)
            self._deliver_report(core, report)

    def publish(self, worker: SimulatedWorker) -> None:
        """Send what a worker's cache has to say, if anything."""
        messages = worker.take_messages()
        if messages:
            for core in self._cores:
                self._agenda.after(self._scenario.event_lag_s, self._deliver, core, messages)

    def perform(self, core: RouterCore, effects: Sequence[Effect]) -> None:
        """Do what a core asks of the world after a command, and let its peers hear of it."""
        for effect in effects:
            if isinstance(effect, RequestCheckpoint):
                worker = self._workers[effect.rank.worker_id]
                worker.require_checkpoint()
                self.publish(worker)
            elif isinstance(effect, FetchWorker):
                worker = self._workers[effect.worker_id]
                if worker.engine is not None:
                    core.upsert_worker(worker.announcement, self._agenda.now_s)
            elif isinstance(effect, SendBeacon):
                self._agenda.after(self._scenario.event_lag_s, self._hear, effect.beacon)
            elif isinstance(effect, TellReplica):
                self._peers.send(core, effect)
            elif isinstance(effect, AdmitWaiting | RefuseWaiting) and self._attend is not None:
                self._attend(core, effect)
        self._peers.stir(core)

    def _hear(self, beacon: Beacon) -> None:
        self._heard[beacon.source_id] = beacon.beacon_id

    def _deliver(self, core: RouterCore, messages: Sequence[LogMessage]) -> None:
        for message in messages:
            core.apply(message, self._agenda.now_s)
            while core.apply_slice():
                pass

    def _report(self, worker: SimulatedWorker) -> None:
        self._agenda.after(self._scenario.report_interval_s, self._report, worker)
        if worker.engine is None:
            return
        report = worker.report(self._heard, self._agenda.now_s)
        for core in self._cores:
            self._agenda.after(self._scenario.report_lag_s, self._deliver_report, core, report)

    def _deliver_report(self, core: RouterCore, report: LoadReport) -> None:
        self.perform(core, core.apply_load(report, self._agenda.now_s))

    def _tick(self) -> None:
        now_s = self._agenda.now_s
        self._agenda.after(TICK_S, self._tick)
        for core in self._cores:
            self.perform(core, [*core.tick(now_s), core.beacon(now_s)])
            while core.tidy(now_s):
                pass
