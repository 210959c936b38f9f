"""A trace in virtual time: simulated engines around real router cores.

    requests ─▶ RouterCore.submit ─▶ engine ─▶ prefill_complete … free ─▶ RouterCore
                     ▲  events, load reports, each after its lag │
                     └───────────────────────────────────────────┘

One event queue determines what happens next, no component reads a clock, and the only randomness is
that of the cores, drawn from the scenario's seed: the same trace, scenario and cores give the same
results, to the last bit.

A request arrives at its time, or a think time after the responses that it waits for: how fast a
fleet is decides how much it is asked.
"""

from collections.abc import Callable
from math import inf
from random import Random
from typing import TypeAlias

from router.core.core import RouterCore
from router.simulator.agenda import EventQueue
from router.simulator.bus import Bus
from router.simulator.callers import BackgroundRequests, SimulatedClients
from router.simulator.engine_runs import Work
from router.simulator.outcomes import Gaps, RequestResult, RequestResults, collected
from router.simulator.scenario import Failure, Incident, Scenario
from router.simulator.simulated_worker import SimulatedWorker
from router.simulator.traces import Trace

SAMPLES = 120
"""The number of samples of the workers' busy time within a trace."""

MakeCore: TypeAlias = Callable[[Random], RouterCore]
OnProgress: TypeAlias = Callable[[float], None]


def simulate(
    trace: Trace, scenario: Scenario, make_core: MakeCore, on_progress: OnProgress = lambda _: None
) -> RequestResults:
    """Replay a trace; return the results.

    `make_core` creates a router's core from its source of randomness; `on_progress` is called now
    and then with the fraction of requests done.
    """
    return _Simulation(trace, scenario, make_core, on_progress).run()


class _Simulation:
    __slots__ = (
        "_agenda",
        "_background",
        "_block_size",
        "_bus",
        "_busy_s",
        "_callers",
        "_gaps",
        "_on_progress",
        "_outcomes",
        "_sampled_s",
        "_scenario",
        "_workers",
    )

    def __init__(
        self, trace: Trace, scenario: Scenario, make_core: MakeCore, on_progress: OnProgress
    ) -> None:
        self._block_size = trace.block_size
        self._scenario = scenario
        self._on_progress = on_progress
        self._agenda = EventQueue()
        rng = Random(scenario.seed)
        cores = [make_core(Random(rng.getrandbits(64))) for _ in range(scenario.routers)]
        self._workers = [
            SimulatedWorker(i, scenario, trace.block_size, Random(rng.getrandbits(64)))
            for i in range(len(scenario.models))
        ]
        self._outcomes = [
            RequestResult(request, request.arrival_s / scenario.arrival_speed)
            for request in trace.requests
        ]
        self._bus = Bus(self._agenda, scenario, cores, self._workers, Random(rng.getrandbits(64)))
        self._background: BackgroundRequests | None = None
        if scenario.background is not None:
            source = Random(rng.getrandbits(64))
            self._background = BackgroundRequests(scenario.background, trace.block_size, source)
        worker_ids = range(len(self._workers))
        self._callers = SimulatedClients(
            self._agenda,
            self._bus,
            cores,
            worker_ids,
            self._outcomes,
            self._submit,
            reports_late=scenario.reports_late,
        )
        self._gaps = Gaps()
        self._sampled_s: list[float] = []
        self._busy_s: list[list[float]] = []

    def run(self) -> RequestResults:
        """Run until every request is served or given up."""
        self._bus.begin()
        for incident in self._scenario.incidents:
            self._agenda.at(incident.at_s, self._apply_incident, incident)
        if self._background is not None:
            for worker in self._workers:
                self._agenda.after(self._background.gap_s(), self._intrude, worker)
        self._sample_every(self._outcomes[-1].arrival_s / SAMPLES or 1.0)
        self._agenda.at(self._outcomes[0].arrival_s, self._callers.arrive, 0)
        while self._callers.done < len(self._outcomes):
            self._agenda.step()
        self._sample()
        return collected(
            self._outcomes, self._block_size, self._gaps, self._sampled_s, self._busy_s
        )

    # ── Engines at work ──────────────────────────────────────────────────────────────────────────

    def _submit(self, worker_id: int, work: Work) -> bool:
        worker = self._workers[worker_id]
        if worker.engine is None or not worker.engine.fits(work.request):
            return False
        worker.submit(work, self._agenda.now_s)
        self._await(worker)
        return True

    def _await(self, worker: SimulatedWorker) -> None:
        """Publish the events of a change of a worker's load, and schedule the end of its run."""
        self._bus.publish(worker)
        if worker.engine is not None and worker.engine.due_s < inf:
            self._agenda.at(worker.engine.due_s, self._advance, worker)

    def _advance(self, worker: SimulatedWorker) -> None:
        """End a worker's run if it is still due; it may have been cut short."""
        if worker.engine is None or worker.engine.due_s > self._agenda.now_s:
            return
        progress = worker.advance()
        if progress.decoded_tokens:
            self._gaps.add(progress.mean_gap_s, progress.decoded_tokens)
        self._await(worker)
        self._callers.receive(progress)

    def _intrude(self, worker: SimulatedWorker) -> None:
        """Submit a request from elsewhere, and schedule the next one."""
        background = self._background
        assert background is not None
        self._agenda.after(background.gap_s(), self._intrude, worker)
        self._submit(worker.worker_id, background.next())

    # ── Incidents ───────────────────────────────────────────────────────────────────────────────

    def _apply_incident(self, incident: Incident) -> None:
        worker = self._workers[incident.worker]
        if isinstance(incident, Failure):
            self._agenda.after(incident.down_s, self._revive, worker)
            self._callers.lost(worker.fail(self._agenda.now_s))
        else:
            worker.slow_down(incident.slowness, self._agenda.now_s)
            self._await(worker)

    def _revive(self, worker: SimulatedWorker) -> None:
        worker.start()
        self._bus.introduce(worker)

    # ── Samples ─────────────────────────────────────────────────────────────────────────────────

    def _sample_every(self, interval_s: float) -> None:
        self._agenda.after(interval_s, self._sample_every, interval_s)
        self._sample()
        self._on_progress(self._callers.done / len(self._outcomes))

    def _sample(self) -> None:
        self._sampled_s.append(self._agenda.now_s)
        self._busy_s.append([worker.busy_s(self._agenda.now_s) for worker in self._workers])
