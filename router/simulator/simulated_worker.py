"""A simulated engine together with its event journal and load reports."""

from collections.abc import Mapping, Sequence
from random import Random

from msgspec.structs import replace

from router.core.registered_workers import registered_worker
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.events import LogMessage
from router.protocol.loads import LoadReport, PolledLoad
from router.protocol.values import SCHEME, U64_MAX, Identity, Rank, Tier
from router.protocol.workers import WorkerRegistration
from router.publisher.engine_metrics.loads import EngineLoad
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.publisher.engine_metrics.rate_windows import RateEstimator
from router.publisher.journal.journal import EventJournal
from router.simulator.engine import Engine
from router.simulator.engine_runs import Progress, Work
from router.simulator.scenario import Scenario
from router.simulator.vllm_metrics import vllm_metrics


class SimulatedWorker:
    """One worker of one rank, through all its incarnations. `engine` is None while it is down.

    `rng` draws the disturbances of its engines.
    """

    __slots__ = (
        "_block_size",
        "_busy_s",
        "_estimator",
        "_journal",
        "_life",
        "_model",
        "_report_id",
        "_rng",
        "_scenario",
        "_shows_classes",
        "_slowness",
        "engine",
        "worker_id",
    )

    def __init__(self, worker_id: int, scenario: Scenario, block_size: int, rng: Random) -> None:
        self.worker_id = worker_id
        self._scenario = scenario
        self._model = scenario.models[worker_id]
        self._block_size = block_size
        self._rng = rng
        self._estimator = RateEstimator()
        self._slowness = 1.0
        self._life = 0
        self._busy_s = 0.0
        self.start()

    @property
    def announcement(self) -> WorkerAnnouncement:
        """The announcement that its agent would publish, or its registration."""
        endpoint, identity = f"http://worker-{self.worker_id}", self._journal.identity
        total_kv_blocks = self._model.capacity_tokens // self._block_size
        loads = self._scenario.loads
        if loads.source == "polled":
            registration = WorkerRegistration(
                worker_id=self.worker_id,
                endpoint=endpoint,
                block_size=self._block_size,
                total_kv_blocks=total_kv_blocks,
            )
            return registered_worker(registration, (0,), {}, self._life)
        return WorkerAnnouncement(
            worker_id=self.worker_id,
            name=f"worker {self.worker_id}",
            endpoint=endpoint,
            identity=identity,
            total_kv_blocks=total_kv_blocks,
            max_num_batched_tokens=self._model.chunk_tokens if loads.shows_chunk else 0,
            incarnation=self._life,
        )

    def start(self) -> None:
        """Begin a new, empty incarnation."""
        self._life += 1
        self._report_id = 0
        self.engine: Engine | None = Engine(
            self._model,
            self._block_size,
            layers=self._scenario.layers,
            reports_growth=self._scenario.tracks_output,
            disturbances=self._scenario.disturbances,
            rng=Random(self._rng.getrandbits(64)),
        )
        self.engine.slowness = self._slowness
        identity = Identity(SCHEME, self._block_size)
        self._journal = EventJournal(Rank(self.worker_id, 0), self._life, identity)
        self._shows_classes = bool(self._scenario.layers) and not self._scenario.hides_classes
        if self._shows_classes:
            self._journal.set_layout(self.engine.checkpoints.layout)

    def fail(self, now_s: float) -> list[Work]:
        """Stop the engine; return the requests that were in it."""
        self._busy_s = self.busy_s(now_s)
        engine, self.engine = self.engine, None
        return [] if engine is None else engine.works()

    def busy_s(self, now_s: float) -> float:
        """Return the seconds worked in all incarnations."""
        return self._busy_s + (0.0 if self.engine is None else self.engine.busy_s(now_s))

    def slow_down(self, slowness: float, now_s: float) -> None:
        """Multiply step durations from the next step on, in this incarnation and later ones."""
        self._slowness = slowness
        if self.engine is not None:
            self.engine.slowness = slowness
            self.engine.interrupt(now_s)

    def submit(self, work: Work, now_s: float) -> None:
        """Add a request to a live worker."""
        assert self.engine is not None
        self.engine.submit(work, now_s)
        self._note_evicted(self.engine)

    def advance(self) -> Progress:
        """End the run of steps that is due; return its results."""
        assert self.engine is not None
        progress = self.engine.advance()
        for work in (*progress.prefilled, *progress.recomputed):
            self._journal.stored(Tier.DEVICE, work.request.sequence_hashes, None)
            if self._shows_classes:
                for index, hashes in self.engine.checkpoints.by_class(work.kept):
                    self._journal.class_stored(index, hashes)
        self._note_evicted(self.engine)
        return progress

    def require_checkpoint(self) -> None:
        """Send a checkpoint next, as a router requested."""
        self._journal.require_checkpoint()

    def take_messages(self) -> Sequence[LogMessage]:
        """Return the pending messages of the event log."""
        return self._journal.take() if self._journal.has_news else ()

    def report(self, heard: Mapping[int, int], now_s: float) -> LoadReport:
        """Return a load report of this moment, with the latest beacons received."""
        assert self.engine is not None
        self._report_id += 1
        load = self._reported(self.engine, now_s)
        return LoadReport(
            worker_id=self.worker_id,
            dp_rank=0,
            agent_incarnation=self._life,
            incarnation=self._life,
            report_id=self._report_id,
            event_id=self._journal.last_event_id,
            state=self._journal.taken_state,
            heard=dict(heard),
            counters=load.counters,
            gauges=load.gauges,
            constants=load.constants,
        )

    def poll(self, now_s: float) -> PolledLoad:
        """Return the load in the metrics of this moment."""
        assert self.engine is not None
        metrics = EngineMetrics("vllm", vllm_metrics(self.engine, self._block_size, now_s))
        seen = metrics.load(0, metrics.facts())
        assert seen is not None
        load = self._estimator.take(seen, now_s, 0.0)
        return PolledLoad(
            worker_id=self.worker_id,
            dp_rank=0,
            source_id=0,
            life_id=self._estimator.life,
            counters=load.counters,
            gauges=load.gauges,
            constants=load.constants,
            timed=load.timed or (),
        )

    def _reported(self, engine: Engine, now_s: float) -> EngineLoad:
        """Return the load that an agent reports: nothing if it has none, or knows nothing."""
        loads = self._scenario.loads
        if loads.source != "agent":
            return EngineLoad()
        counters, constants = engine.counters(now_s), engine.constants
        factor = loads.busy_factors[self.worker_id % len(loads.busy_factors)]
        counters = replace(counters, busy_s=factor * counters.busy_s)
        if not loads.shows_chunk:
            constants = replace(constants, chunk_tokens=0)
        return EngineLoad(engine.gauges, counters, constants)

    def _note_evicted(self, engine: Engine) -> None:
        evicted = engine.cache.take_evicted()
        full = [name for name in evicted if name <= U64_MAX]
        if full:
            self._journal.removed(Tier.DEVICE, full)
        if self._shows_classes:
            for index, hashes in engine.checkpoints.by_class(evicted):
                self._journal.class_removed(index, hashes)
