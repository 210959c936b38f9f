"""The agent next to an engine: construction, tasks and shutdown.

    run ─┬─ HTTP server: probes, metrics
         └─ stand beside ─┬─ the engine's metrics, polled
                          └─ its sizes known ▶ its ranks followed ▶ reached: presence on the bus
                                   ▲                                ▲  │ gone: withdrawn
                                   │                                └──┤ its facts
                                   └───────────────────────────────────┘ have changed

A worker is announced while its engine can be reached, since routers send requests to announced
workers: from the moment when all its endpoints respond until none has responded for `GONE_S`. In
between, the reports of its ranks contain their trust for routers.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from router.errors import ConfigError
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.subjects import Subjects
from router.protocol.values import Identity
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.follower.pull_follower import PullFollower, TrtllmPoller
from router.publisher.load_publisher import ReceivedBeacons
from router.publisher.zmq.sockets import Context, open_context
from router.runtime.http_server.limits import HttpLimits
from router.runtime.http_server.server import HttpServer, endpoint_of, listening
from router.runtime.own_files import make_own_dir
from router.runtime.process.redaction import redact
from router.runtime.security.edge import Edge
from router.runtime.security.guarded import Guarded
from router.runtime.security.nats_access import nats_access
from worker_agent.bridge.engine_facts import LearnedFacts, ReconciledFacts
from worker_agent.bridge.engine_tiers import EngineTiers
from worker_agent.bridge.metrics import bridge_metrics
from worker_agent.bridge.metrics_poll import MetricsPoll
from worker_agent.bridge.peer_watch import PeerWatch
from worker_agent.bridge.rank import BridgedRank
from worker_agent.bridge.server import BridgeServer, Readiness
from worker_agent.config.bridge import BridgeConfig, rank_addresses
from worker_agent.operations.bus import TierResponder
from worker_agent.process.presence import Answering, WorkerPresence

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
PULL_INTERVAL_S = 0.2
LOOK_S = 0.05
"""The interval of the checks whether the engine can be reached."""
GONE_S = 5.0
"""An engine without a response on any endpoint for this time is withdrawn."""


class BridgeAgent:
    """One worker; `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: BridgeConfig) -> None:
        self._config = config
        self._addresses = rank_addresses(config)
        self._edge = Edge(config.security)
        self._beacons = ReceivedBeacons()
        self._pacing = Pacing()
        self._turns = SliceScheduler()
        self._facts = LearnedFacts(config.engine.given_facts)
        self._changed = asyncio.Event()
        self._ranks: list[BridgedRank] = []
        self._presence: WorkerPresence | None = None
        self._away_since_s: float | None = None
        self._is_stopping = False
        self._poll = self._metrics_poll()
        self._tiers = self._engine_tiers()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve the engine until `stop` is set; then withdraw, save the state and close.

        Raises ConfigError, also in a group, and TwinError in a group.
        """
        config = self._config
        self._make_state_dir()
        edge = self._edge
        limits = HttpLimits.of(config.http, config.security, MAX_CONNECTIONS)
        metrics = bridge_metrics(
            lambda: self._facts.model_name, lambda: self._ranks, self._poll, self._tiers
        )
        server_of = BridgeServer(
            config.worker.id, lambda: self._ranks, self._readiness, metrics, self._tiers
        )
        server = HttpServer(Guarded(server_of.app(), edge.guard), limits, edge.tls)
        with listening(config.security.host, config.http.http_port) as listener:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve([listener]))
                beside = group.create_task(self._run_beside_engine())
                watching = group.create_task(self._watch(edge))
                log.info(
                    "worker %d (%s) stands beside %s at %s; probes on %s",
                    *(config.worker.id, config.worker.name, config.kind, config.agent.endpoint),
                    endpoint_of(listener, has_tls=edge.tls is not None),
                )
                await stop.wait()
                self._is_stopping = True
                beside.cancel()
                await asyncio.wait([beside])
                server.should_exit = True
                await serving
                watching.cancel()
        log.info("worker stopped")

    async def _watch(self, edge: Edge) -> None:
        """Keep what files and the engine's tiers say up to date, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(edge.run())
            if self._tiers is not None:
                group.create_task(self._tiers.run())

    async def _run_beside_engine(self) -> None:
        """Run one life after another; an engine with changed facts starts a new life."""
        with open_context(len(self._addresses)) as context:
            async with asyncio.TaskGroup() as group:
                if self._poll is not None:
                    group.create_task(self._poll.run())
                while True:
                    await self._live(await self._settled(), context)

    async def _settled(self) -> ReconciledFacts:
        """Return the facts on the engine, once they are known. Raises ConfigError."""
        while True:
            self._changed.clear()
            facts = self._facts.settled()
            if facts is not None and (self._poll is None or self._poll.readings):
                return facts
            await self._changed.wait()

    async def _live(self, facts: ReconciledFacts, context: Context) -> None:
        """Follow the engine and publish its state, until its facts change."""
        config, incarnation = self._config, time.time_ns() // 1000
        shared = self._beacons, self._pacing, self._turns
        self._ranks = [
            BridgedRank(config, addresses, facts, incarnation, *shared)
            for addresses in self._addresses
        ]
        announcement = self._announcement(facts, incarnation)
        presence = self._presence = WorkerPresence(
            config.bus,
            nats_access(config.nats, config.bus.nats_url),
            Subjects(config.worker.namespace),
            announcement,
            self._ranks,
            self._beacons,
            self._answering(announcement),
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(rank.run(context)) for rank in self._ranks]
                if (pull := self._pull()) is not None:
                    tasks.append(group.create_task(pull.run()))
                while not self._changed.is_set():
                    await self._until(self._is_reached)
                    on_bus = group.create_task(presence.run())
                    await self._until(self._is_gone)
                    on_bus.cancel()
                    await asyncio.wait([on_bus])
                for task in tasks:
                    task.cancel()
        finally:
            self._ranks, self._presence = [], None

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true, or the engine's facts change."""
        while not (self._changed.is_set() or condition()):
            await asyncio.sleep(LOOK_S)

    def _is_reached(self) -> bool:
        """Return whether all endpoints of the engine respond."""
        self._away_since_s = None
        return self._answers and all(rank.is_connected for rank in self._ranks)

    def _is_gone(self) -> bool:
        """Return whether no endpoint of the engine has responded for `GONE_S`."""
        now_s = time.monotonic()
        is_away = not any(rank.is_connected for rank in self._ranks)
        if not is_away or (self._poll is not None and self._answers):
            self._away_since_s = None
        elif self._away_since_s is None:
            self._away_since_s = now_s
        elif now_s - self._away_since_s > GONE_S:
            log.warning("worker withdrawn: no response from the engine for %g s", GONE_S)
            return True
        return False

    @property
    def _answers(self) -> bool:
        """True if the last reading of its metrics succeeded, or it has none."""
        return self._poll is None or self._poll.problem is None

    def _take(self, metrics: EngineMetrics, dated_s: float, took_s: float) -> None:
        """Apply a reading of the engine's metrics."""
        changes = self._facts.record(metrics.facts())
        if changes and self._ranks:
            log.warning("the engine has changed: %s; the worker is announced anew", changes)
        if changes or not self._ranks:
            self._changed.set()
        for rank in self._ranks:
            rank.take(metrics, dated_s, took_s)

    def _announcement(self, facts: ReconciledFacts, incarnation: int) -> WorkerAnnouncement:
        c, agent = self._config, self._config.agent
        assert agent.endpoint is not None
        return WorkerAnnouncement(
            worker_id=c.worker.id,
            name=c.worker.name,
            model_name=facts.model_name,
            routing_group=agent.routing_group,
            endpoint=agent.endpoint,
            identity=Identity(c.naming.scheme, facts.block_size, c.engine.eagle),
            total_kv_blocks=facts.total_kv_blocks,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            data_parallel_start_rank=agent.data_parallel_start_rank,
            data_parallel_size=agent.data_parallel_size,
            role=agent.role,
            incarnation=incarnation,
            agent_is_engine=False,
            labels=agent.labels(),
            block_addresses={
                each.rank.dp_rank: each.shared for each in self._addresses if each.shared
            },
            blocksets={} if self._tiers is None else self._tiers.blocksets,
        )

    def _answering(self, announcement: WorkerAnnouncement) -> list[Answering]:
        """Return the tasks on the bus that concern the engine's tiers."""
        if self._tiers is None:
            return []
        answers = TierResponder(self._tiers, self._config.worker.id, self._edge.guard)
        if not any(each.blocks for each in self._addresses):
            return [answers.run]
        return [answers.run, PeerWatch(self._tiers, announcement).run]

    def _engine_tiers(self) -> EngineTiers | None:
        if self._config.engine.control_listen is None:
            return None
        addresses = {each.rank.dp_rank: each.control for each in self._addresses}
        shared = {each.rank.dp_rank: each.blocks for each in self._addresses if each.blocks}
        return EngineTiers(self._config.worker.id, addresses, shared, self._announce_blocksets)

    def _announce_blocksets(self) -> None:
        if self._presence is not None and self._tiers is not None:
            self._presence.change_blocksets(self._tiers.blocksets)

    def _readiness(self) -> Readiness:
        """Return the readiness: ready once announced; later problems only degrade it."""
        if self._is_stopping:
            return Readiness(False, ["stopping"], [])
        if self._presence is not None and self._presence.is_announced:
            return Readiness(True, [], list(self._problems()))
        return Readiness(False, [*self._problems(), *self._missing()], [])

    def _problems(self) -> Iterator[str]:
        """Yield the problems between the agent and the engine."""
        poll = self._poll
        if poll is not None and poll.problem is not None:
            age_s = None if poll.read_s is None else time.monotonic() - poll.read_s
            last = "" if age_s is None else f"; last read {age_s:.0f} s ago"
            yield redact(f"{self._config.engine.metrics_url}: {poll.problem}{last}")
        yield from filter(None, (rank.problem() for rank in self._ranks))
        if self._tiers is not None and self._tiers.problem is not None:
            yield f"its tiers are unknown: {self._tiers.problem}"

    def _missing(self) -> Iterator[str]:
        """Yield what the announcement waits for, without any problem."""
        if not self._ranks:
            yield from (
                f"{n}: neither set nor reported by the engine" for n in self._facts.unknown()
            )
        elif all(rank.is_connected for rank in self._ranks):
            yield f"not announced yet on NATS at {redact(self._config.bus.nats_url)}"

    def _pull(self) -> TrtllmPoller | None:
        """Return the poll of all ranks' events, if the engine must be polled; else None."""
        followers = [r.follower for r in self._ranks if isinstance(r.follower, PullFollower)]
        url = self._config.engine.events_url
        return None if url is None else TrtllmPoller(url, followers, PULL_INTERVAL_S)

    def _metrics_poll(self) -> MetricsPoll | None:
        engine = self._config.engine
        if engine.metrics_url is None:
            return None
        return MetricsPoll(
            self._config.kind, engine.metrics_url, engine.metrics_interval_s, self._take
        )

    def _make_state_dir(self) -> None:
        state_dir = self._config.engine.state_dir
        if state_dir is None:
            return
        try:
            make_own_dir(Path(state_dir))
        except OSError as error:
            raise ConfigError("state_dir", str(error), "a folder that can be written") from error
