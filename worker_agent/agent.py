"""The agent that is its own engine: who is made of whom, who runs when, and how it stops.

    run ─┬─ HTTP server
         ├─ one runner a rank, all computing on one thread
         └─ presence on the bus

It stops in the order in which it is depended on: first routers forget it, then requests end, then
the server closes, then the tiers.
"""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from secrets import randbits

import torch

from router.process.http_limits import HttpLimits
from router.process.serving import HttpServer, endpoint_of, listening
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.beacons import HeardBeacons
from router.publisher.events import MIN_FLUSH_S, KvEventPublisher
from router.publisher.journal import EventJournal
from router.publisher.local_index import LocalIndex
from router.security.edge import Edge
from router.security.guarded import Guarded
from worker_agent.agent_sharing import AgentSharing
from worker_agent.agent_tiers import cache_model, cache_secret, manager_config
from worker_agent.blocks.levels import CacheLevel
from worker_agent.blocks.names import Naming
from worker_agent.config import ReferenceConfig
from worker_agent.engine.cache import CacheLayout
from worker_agent.engine.model import Model, ModelConfig
from worker_agent.engine.reference import EngineConfig, ReferenceEngine
from worker_agent.engine.tiering import RankMemory
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager import KvBlockManager
from worker_agent.operations.bus import TierAnswers
from worker_agent.operations.control import ControlledRank, TierControl
from worker_agent.presence import Presence
from worker_agent.runner import RankRunner
from worker_agent.server import EngineServer

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096

ADVICE_TIMEOUT_S = 60.0
"""A tier that was not measured by then is said nothing of."""


class WorkerAgent:
    """One worker. `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: ReferenceConfig) -> None:
        self._config = config
        self._subjects = Subjects(config.namespace)
        self._incarnation = time.time_ns() // 1000
        self._beacons = HeardBeacons()
        torch.set_num_threads(config.num_threads)
        model = Model(_model_config(config), _device(config.device))
        self._secret = cache_secret(config)
        self._edge = Edge(config)
        self._managers: dict[Rank, KvBlockManager] = {}
        with ExitStack() as undo:
            self._runners = [self._runner(model, rank, undo) for rank in config.ranks]
            self._sharing = self._shared(undo)
            self._closing = undo.pop_all()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then withdraw, drain, close. Raises ConfigError, and TwinError
        in a group.
        """
        try:
            await self._serve(stop)
        finally:
            await asyncio.to_thread(self._closing.close)
        log.info("worker stopped")

    async def _serve(self, stop: asyncio.Event) -> None:
        edge, limits = self._edge, HttpLimits.of(self._config, MAX_CONNECTIONS)
        with (
            listening(self._config.host, self._config.http_port) as listener,
            ThreadPoolExecutor(1, "engine") as executor,
        ):
            endpoint = self._config.endpoint or endpoint_of(listener, has_tls=edge.tls is not None)
            announcement = self._announcement(endpoint)
            tiers = self._tier_control()
            answers = TierAnswers(tiers, self._config.id, edge.guard)
            answering = [answers.run]
            if self._sharing is not None:
                answering.append(self._sharing.book.run)
            presence = Presence(self._config, announcement, self._runners, self._beacons, answering)
            server_of = EngineServer(
                self._config,
                self._runners,
                tiers,
                lambda: presence.is_announced,
                self._sharing,
            )
            server = HttpServer(Guarded(server_of.app(), edge.guard), limits, edge.tls)
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve([listener]))
                running = [group.create_task(r.run(executor)) for r in self._runners]
                running.append(group.create_task(edge.run()))
                running.append(group.create_task(self._advise()))
                on_bus = group.create_task(presence.run())
                log.info(
                    "worker %d (%s) listens on %s", self._config.id, self._config.name, endpoint
                )
                await stop.wait()
                on_bus.cancel()
                await self._drain()
                server.should_exit = True
                await serving
                for task in running:
                    task.cancel()

    async def _advise(self) -> None:
        """Say what is to be said of the tiers, once they were measured."""
        for rank, manager in self._managers.items():
            deadline_s = time.monotonic() + ADVICE_TIMEOUT_S
            while not manager.stack.is_probed and time.monotonic() < deadline_s:
                await asyncio.sleep(0.1)
            for line in manager.advice():
                log.warning("rank %d: %s", rank.dp_rank, line)

    def _tier_control(self) -> TierControl:
        ranks = {
            runner.rank.dp_rank: ControlledRank(self._managers[runner.rank], runner.wake)
            for runner in self._runners
        }
        return TierControl(self._config.id, self._config.naming, ranks)

    async def _drain(self) -> None:
        deadline_s = time.monotonic() + self._config.drain_s
        while any(runner.request_count for runner in self._runners):
            if time.monotonic() > deadline_s:
                log.warning("requests still run after %g s; closing", self._config.drain_s)
                return
            await asyncio.sleep(0.05)

    def _announcement(self, endpoint: str) -> WorkerAnnouncement:
        c = self._config
        return WorkerAnnouncement(
            worker_id=c.id,
            name=c.name,
            model_name=c.model_name,
            routing_group=c.routing_group,
            endpoint=endpoint,
            identity=c.identity,
            total_kv_blocks=c.num_blocks,
            max_num_batched_tokens=c.max_num_batched_tokens,
            data_parallel_start_rank=c.data_parallel_start_rank,
            data_parallel_size=c.data_parallel_size,
            role=c.role,
            incarnation=self._incarnation,
            labels=c.labels(),
            block_addresses={} if self._sharing is None else self._sharing.addresses,
        )

    def _shared(self, undo: ExitStack) -> AgentSharing | None:
        """Closed before the memory that its blocks lie in."""
        if not self._config.share:
            return None
        model = cache_model(self._config)
        sharing = AgentSharing(
            self._config, self._incarnation, self._managers, model, self._edge.tls
        )
        undo.callback(sharing.close)
        return sharing

    def _runner(self, model: Model, rank: Rank, undo: ExitStack) -> RankRunner:
        c = self._config
        engine_config = EngineConfig(
            c.num_blocks,
            c.block_size,
            c.max_num_batched_tokens,
            c.max_running_requests,
            layout=CacheLayout(LayoutKind(c.kv_layout)),
            load_timeout_s=c.onboard_timeout_s,
        )
        tiers = manager_config(c, rank.dp_rank, str(model.device))
        manager = undo.enter_context(KvBlockManager(tiers))
        self._managers[rank] = manager
        naming = Naming(self._secret, f"{tiers.model.fingerprint:016x}")
        engine = ReferenceEngine(model, engine_config, naming, _memory(manager))
        undo.callback(engine.close)
        multiplier = randbits(64) | 1
        journal = EventJournal(
            rank, self._incarnation, c.identity, multiplier=multiplier, naming=c.naming
        )
        events = KvEventPublisher(
            journal,
            self._subjects.events(rank),
            flush_interval_s=c.event_flush_s or MIN_FLUSH_S,
        )
        return RankRunner(
            rank,
            self._incarnation,
            engine,
            events,
            LocalIndex(journal),
            self._subjects.load(rank),
            load_interval_s=c.load_interval_s,
            max_waiting=c.max_waiting_requests,
            beacons=self._beacons,
        )


def _memory(manager: KvBlockManager) -> RankMemory:
    device = manager.block_sets()[CacheLevel.G1]
    assert device.memory.physical is not None
    return RankMemory(device.blocks.pool, device.memory.physical, manager.stack)


def _model_config(config: ReferenceConfig) -> ModelConfig:
    return ModelConfig(
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.max_model_len,
        config.seed,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
