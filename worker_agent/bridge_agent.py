"""The agent beside an engine: who is made of whom, who runs when, and how it stops.

    run ─┬─ HTTP server: probes, metrics
         └─ stand beside ─┬─ the engine's metrics, read again and again
                          └─ its sizes known ▶ its ranks followed ▶ reached: presence on the bus
                                   ▲                                ▲  │ gone: withdrawn
                                   │                                └──┤ it says other things
                                   └───────────────────────────────────┘ of itself than before

A worker is announced while its engine can be reached, since routers send requests to whoever is
announced: from when it answers on every side until it has answered on none for long. In between,
what its ranks' reports say tells routers how far to trust it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from router.errors import ConfigError
from router.process.http_limits import HttpLimits
from router.process.serving import HttpServer, endpoint_of, listening
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import Identity
from router.publisher.beacons import HeardBeacons
from router.publisher.engine_metrics import EngineMetrics
from router.publisher.pacing import Pacing
from router.publisher.pull_follower import PullFollower
from router.publisher.trtllm_pull import TrtllmPull
from router.publisher.turns import Turns
from router.publisher.zmq_context import open_context
from router.publisher.zmq_sockets import Context
from router.security.edge import Edge
from router.security.guarded import Guarded
from worker_agent.bridge_config import BridgeConfig, rank_addresses
from worker_agent.bridge_metrics import BridgeCollector
from worker_agent.bridge_server import BridgeServer, Readiness
from worker_agent.bridged_rank import BridgedRank
from worker_agent.engine_facts import LearnedFacts, SettledFacts
from worker_agent.metrics_poll import MetricsPoll
from worker_agent.presence import Presence

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
PULL_INTERVAL_S = 0.2
LOOK_S = 0.05
"""Between two looks whether the engine is there."""
GONE_S = 5.0
"""An engine that answers on no side for so long gets no more requests."""


class BridgeAgent:
    """One worker. `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: BridgeConfig) -> None:
        self._config = config
        self._addresses = rank_addresses(config)
        self._beacons = HeardBeacons()
        self._pacing = Pacing()
        self._turns = Turns()
        self._facts = LearnedFacts(config.given_facts)
        self._news = asyncio.Event()
        self._ranks: list[BridgedRank] = []
        self._presence: Presence | None = None
        self._away_since_s: float | None = None
        self._is_stopping = False
        self._poll = self._metrics_poll()

    async def run(self, stop: asyncio.Event) -> None:
        """Stand beside the engine until `stop` is set; then withdraw, keep the state, close. Raises
        ConfigError, also in a group, and TwinError in a group.
        """
        config = self._config
        self._make_state_dir()
        edge, limits = Edge(config), HttpLimits.of(config, MAX_CONNECTIONS)
        collector = BridgeCollector(lambda: self._facts.model_name, lambda: self._ranks, self._poll)
        server_of = BridgeServer(
            config.id, lambda: self._ranks, self._readiness, collector.registry
        )
        server = HttpServer(Guarded(server_of.app(), edge.guard), limits, edge.tls)
        with listening(config.host, config.http_port) as listener:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve([listener]))
                beside = group.create_task(self._stand_beside())
                watching = group.create_task(edge.run())
                log.info(
                    "worker %d (%s) stands beside %s at %s; probes on %s",
                    *(config.id, config.name, config.engine, config.endpoint),
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

    async def _stand_beside(self) -> None:
        """One life after another: an engine that says other things of itself is another one."""
        with open_context(len(self._addresses)) as context:
            async with asyncio.TaskGroup() as group:
                if self._poll is not None:
                    group.create_task(self._poll.run())
                while True:
                    await self._live(await self._settled(), context)

    async def _settled(self) -> SettledFacts:
        """What is true of the engine, as soon as it is known. Raises ConfigError."""
        while True:
            self._news.clear()
            facts = self._facts.settled()
            if facts is not None and (self._poll is None or self._poll.readings):
                return facts
            await self._news.wait()

    async def _live(self, facts: SettledFacts, context: Context) -> None:
        """Follow the engine and tell of it, until it is another one."""
        config, incarnation = self._config, time.time_ns() // 1000
        shared = self._beacons, self._pacing, self._turns
        self._ranks = [
            BridgedRank(config, addresses, facts, incarnation, *shared)
            for addresses in self._addresses
        ]
        announcement = self._announcement(facts, incarnation)
        presence = self._presence = Presence(config, announcement, self._ranks, self._beacons)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(rank.run(context)) for rank in self._ranks]
                if (pull := self._pull()) is not None:
                    tasks.append(group.create_task(pull.run()))
                while not self._news.is_set():
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
        """Until it is so, or the engine is another one."""
        while not (self._news.is_set() or condition()):
            await asyncio.sleep(LOOK_S)

    def _is_reached(self) -> bool:
        """Does the engine answer on every side?"""
        self._away_since_s = None
        return self._answers and all(rank.is_connected for rank in self._ranks)

    def _is_gone(self) -> bool:
        """Has the engine answered on no side for long?"""
        now_s = time.monotonic()
        is_away = not any(rank.is_connected for rank in self._ranks)
        if not is_away or (self._poll is not None and self._answers):
            self._away_since_s = None
        elif self._away_since_s is None:
            self._away_since_s = now_s
        elif now_s - self._away_since_s > GONE_S:
            log.warning("the engine has been away for %g s: withdrawn until it is back", GONE_S)
            return True
        return False

    @property
    def _answers(self) -> bool:
        """Could its metrics be read the last time, if it has any?"""
        return self._poll is None or self._poll.problem is None

    def _take(self, metrics: EngineMetrics) -> None:
        """A reading of the engine's metrics."""
        changes = self._facts.hear(metrics.facts())
        if changes and self._ranks:
            log.warning("the engine is another one: %s; beginning anew", changes)
        if changes or not self._ranks:
            self._news.set()
        for rank in self._ranks:
            rank.take(metrics)

    def _announcement(self, facts: SettledFacts, incarnation: int) -> WorkerAnnouncement:
        c = self._config
        assert c.endpoint is not None
        return WorkerAnnouncement(
            worker_id=c.id,
            name=c.name,
            model_name=facts.model_name,
            routing_group=c.routing_group,
            endpoint=c.endpoint,
            identity=Identity(c.naming.scheme, facts.block_size, c.eagle),
            total_kv_blocks=facts.total_kv_blocks,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            data_parallel_start_rank=c.data_parallel_start_rank,
            data_parallel_size=c.data_parallel_size,
            role=c.role,
            incarnation=incarnation,
            agent_is_engine=False,
            labels=c.labels(),
        )

    def _readiness(self) -> Readiness:
        """Not ready until routers know of the engine; later troubles only degrade."""
        if self._is_stopping:
            return Readiness(False, ["stopping"], [])
        if self._presence is not None and self._presence.is_announced:
            return Readiness(True, [], list(self._problems()))
        return Readiness(False, [*self._problems(), *self._missing()], [])

    def _problems(self) -> Iterator[str]:
        """What is wrong between us and the engine."""
        poll = self._poll
        if poll is not None and poll.problem is not None:
            age_s = None if poll.read_s is None else time.monotonic() - poll.read_s
            last = "" if age_s is None else f"; last read {age_s:.0f} s ago"
            yield f"{self._config.metrics_url}: {poll.problem}{last}"
        yield from filter(None, (rank.problem() for rank in self._ranks))

    def _missing(self) -> Iterator[str]:
        """What routers wait for, where nothing is wrong."""
        if not self._ranks:
            yield from (
                f"{n}: neither set nor reported by the engine" for n in self._facts.unknown()
            )
        elif all(rank.is_connected for rank in self._ranks):
            yield f"not announced yet on NATS at {self._config.nats_url}"

    def _pull(self) -> TrtllmPull | None:
        """One question for all ranks, where the engine has to be asked."""
        followers = [r.follower for r in self._ranks if isinstance(r.follower, PullFollower)]
        url = self._config.events_url
        return None if url is None else TrtllmPull(url, followers, PULL_INTERVAL_S)

    def _metrics_poll(self) -> MetricsPoll | None:
        c = self._config
        if c.metrics_url is None:
            return None
        return MetricsPoll(c.kind, c.metrics_url, c.metrics_interval_s, self._take)

    def _make_state_dir(self) -> None:
        if self._config.state_dir is None:
            return
        try:
            Path(self._config.state_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("state_dir", str(error), "a folder that can be written") from error
