"""A trace in virtual time: simulated engines around real router cores.

    requests ─▶ RouterCore.submit ─▶ engine ─▶ prefill_complete … free ─▶ RouterCore
                     ▲  events, load reports, each after its lag │
                     └───────────────────────────────────────────┘

One agenda says what happens next, nothing here knows a clock, and the only randomness is that of
the cores, drawn from the scenario's seed: the same trace, scenario and cores give the same
outcomes, to the last bit.
"""

from collections.abc import Callable
from math import inf
from random import Random
from typing import TypeAlias

from router.core import RouterCore
from router.simulator.agenda import Agenda
from router.simulator.bus import Bus
from router.simulator.callers import Callers
from router.simulator.engine import Work
from router.simulator.outcomes import Gaps, Outcome, Outcomes, collected
from router.simulator.scenario import Failure, Incident, Scenario
from router.simulator.simulated_worker import SimulatedWorker
from router.simulator.traces import Trace

SAMPLES = 120
"""How often within a trace it is noted how busy everybody was."""

MakeCore: TypeAlias = Callable[[Random], RouterCore]
OnProgress: TypeAlias = Callable[[float], None]


def simulate(
    trace: Trace, scenario: Scenario, make_core: MakeCore, on_progress: OnProgress = lambda _: None
) -> Outcomes:
    """Replay a trace. `make_core` makes a router's core, given its randomness; `on_progress` is
    told, now and then, the fraction of requests done.
    """
    return _Simulation(trace, scenario, make_core, on_progress).run()


class _Simulation:
    __slots__ = (
        "_agenda",
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
        self._agenda = Agenda()
        rng = Random(scenario.seed)
        cores = [make_core(Random(rng.getrandbits(64))) for _ in range(scenario.routers)]
        self._workers = [
            SimulatedWorker(i, model, trace.block_size, tells_growth=scenario.tracks_output)
            for i, model in enumerate(scenario.models)
        ]
        self._outcomes = [
            Outcome(request, request.arrival_s / scenario.arrival_speed)
            for request in trace.requests
        ]
        self._bus = Bus(self._agenda, scenario, cores, self._workers)
        worker_ids = range(len(self._workers))
        self._callers = Callers(
            self._agenda, self._bus, cores, worker_ids, self._outcomes, self._submit
        )
        self._gaps = Gaps()
        self._sampled_s: list[float] = []
        self._busy_s: list[list[float]] = []

    def run(self) -> Outcomes:
        """Until every request is served, or was given up."""
        self._bus.begin()
        for incident in self._scenario.incidents:
            self._agenda.at(incident.at_s, self._befall, incident)
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
        """Publish what a change of its work brought about, and wait for the end of its run."""
        self._bus.publish(worker)
        if worker.engine is not None and worker.engine.due_s < inf:
            self._agenda.at(worker.engine.due_s, self._advance, worker)

    def _advance(self, worker: SimulatedWorker) -> None:
        """A run was to end now; it may have been cut short, and be over already."""
        if worker.engine is None or worker.engine.due_s > self._agenda.now_s:
            return
        progress = worker.advance()
        if progress.decoded_tokens:
            self._gaps.add(progress.mean_step_s, progress.decoded_tokens)
        self._await(worker)
        self._callers.hear(progress)

    # ── What befalls them ────────────────────────────────────────────────────────────────────────

    def _befall(self, incident: Incident) -> None:
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

    # ── What is noted ────────────────────────────────────────────────────────────────────────────

    def _sample_every(self, interval_s: float) -> None:
        self._agenda.after(interval_s, self._sample_every, interval_s)
        self._sample()
        self._on_progress(self._callers.done / len(self._outcomes))

    def _sample(self) -> None:
        self._sampled_s.append(self._agenda.now_s)
        self._busy_s.append([worker.busy_s(self._agenda.now_s) for worker in self._workers])
