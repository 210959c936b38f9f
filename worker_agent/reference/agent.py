"""The agent that runs its own engine: construction, tasks and shutdown.

    run ─┬─ HTTP server
         ├─ one runner per rank, all computing on one thread
         └─ presence on the bus

Shutdown follows the dependencies: first the worker is withdrawn from routers, then requests end,
then the server closes, then the tiers.
"""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from secrets import randbits

import torch

from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.event_publisher import MIN_FLUSH_S, KvEventPublisher
from router.publisher.journal.journal import EventJournal
from router.publisher.load_publisher import ReceivedBeacons
from router.publisher.rank_queries import LocalIndex
from router.runtime.http_server.limits import HttpLimits
from router.runtime.http_server.server import HttpServer, endpoint_of, listening
from router.runtime.security.edge import Edge
from router.runtime.security.guarded import Guarded
from router.runtime.security.nats_access import nats_access
from worker_agent.blocks.names import CacheLevel, Naming
from worker_agent.config.reference import EngineSettings, ReferenceConfig
from worker_agent.layout.orders import InnerShape
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.control import ControlledRank, TierControl
from worker_agent.manager.manager import KvBlockManager
from worker_agent.manager.settings import cache_model, cache_secret, manager_config
from worker_agent.operations.bus import TierResponder
from worker_agent.process.presence import WorkerPresence
from worker_agent.reference.engine.cache import CacheLayout
from worker_agent.reference.engine.engine import EngineConfig, ReferenceEngine
from worker_agent.reference.engine.model import Model, ModelConfig
from worker_agent.reference.engine.tiering import RankMemory
from worker_agent.reference.runner import RankRunner
from worker_agent.reference.server import EngineServer
from worker_agent.reference.sharing import AgentSharing

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096

ADVICE_TIMEOUT_S = 60.0
"""The timeout of a tier's measurement; without one by then, no advice is logged."""


class WorkerAgent:
    """One worker; `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: ReferenceConfig) -> None:
        self._config = config
        self._subjects = Subjects(config.worker.namespace)
        self._incarnation = time.time_ns() // 1000
        self._beacons = ReceivedBeacons()
        torch.set_num_threads(config.engine.num_threads)
        model = Model(_model_config(config.engine), _device(config.engine.device))
        self._secret = cache_secret(config.tiers, config.worker.id, config.block_keys.read())
        self._edge = Edge(config.security)
        self._managers: dict[Rank, KvBlockManager] = {}
        with ExitStack() as undo:
            self._runners = [
                self._runner(model, rank, undo) for rank in config.agent.ranks(config.worker.id)
            ]
            self._sharing = self._shared(undo)
            self._closing = undo.pop_all()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then withdraw, drain and close.

        Raises ConfigError, and TwinError in a group.
        """
        try:
            await self._serve(stop)
        finally:
            await asyncio.to_thread(self._closing.close)
        log.info("worker stopped")

    async def _serve(self, stop: asyncio.Event) -> None:
        edge, config = self._edge, self._config
        limits = HttpLimits.of(config.http, config.security, MAX_CONNECTIONS)
        with (
            listening(config.security.host, config.http.http_port) as listener,
            ThreadPoolExecutor(1, "engine") as executor,
        ):
            endpoint = config.agent.endpoint or endpoint_of(listener, has_tls=edge.tls is not None)
            announcement = self._announcement(endpoint)
            tiers = self._tier_control()
            answers = TierResponder(tiers, config.worker.id, edge.guard)
            answering = [answers.run]
            if self._sharing is not None:
                answering.append(self._sharing.peers.run)
            access = nats_access(config.nats, config.bus.nats_url)
            presence = WorkerPresence(
                config.bus,
                access,
                self._subjects,
                announcement,
                self._runners,
                self._beacons,
                answering,
            )
            server_of = EngineServer(
                config.worker.id,
                config.agent.routing_group,
                config.engine,
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
                if self._sharing is not None:
                    running.append(group.create_task(self._sharing.expire()))
                on_bus = group.create_task(presence.run())
                worker = config.worker
                log.info("worker %d (%s) listens on %s", worker.id, worker.name, endpoint)
                await stop.wait()
                on_bus.cancel()
                await self._drain()
                server.should_exit = True
                await serving
                for task in running:
                    task.cancel()

    async def _advise(self) -> None:
        """Log advice on the tiers, once they are measured."""
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
        return TierControl(self._config.worker.id, self._config.naming, ranks)

    async def _drain(self) -> None:
        deadline_s = time.monotonic() + self._config.engine.drain_s
        while any(runner.request_count for runner in self._runners):
            if time.monotonic() > deadline_s:
                log.warning("requests still run after %g s; closing", self._config.engine.drain_s)
                return
            await asyncio.sleep(0.05)

    def _announcement(self, endpoint: str) -> WorkerAnnouncement:
        c, agent, engine = self._config, self._config.agent, self._config.engine
        return WorkerAnnouncement(
            worker_id=c.worker.id,
            name=c.worker.name,
            model_name=engine.model_name,
            routing_group=agent.routing_group,
            endpoint=endpoint,
            identity=c.identity,
            total_kv_blocks=engine.num_blocks,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            data_parallel_start_rank=agent.data_parallel_start_rank,
            data_parallel_size=agent.data_parallel_size,
            role=agent.role,
            incarnation=self._incarnation,
            labels=agent.labels(),
            block_addresses={} if self._sharing is None else self._sharing.addresses,
            blocksets={} if self._sharing is None else self._sharing.blocksets,
        )

    def _shared(self, undo: ExitStack) -> AgentSharing | None:
        """Return the block sharing, closed before the memory of its blocks; None if disabled."""
        if not self._config.sharing.share:
            return None
        model = cache_model(self._config.engine)
        naming = Naming(self._secret, f"{model.fingerprint:016x}")
        sharing = AgentSharing(
            self._config, self._incarnation, self._managers, model, self._edge.tls, naming
        )
        undo.callback(sharing.close)
        return sharing

    def _runner(self, model: Model, rank: Rank, undo: ExitStack) -> RankRunner:
        c, bus, engine_settings = self._config, self._config.bus, self._config.engine
        engine_config = EngineConfig(
            engine_settings.num_blocks,
            engine_settings.block_size,
            engine_settings.max_num_batched_tokens,
            engine_settings.max_running_requests,
            layout=CacheLayout.kept_as_computed(
                LayoutKind(engine_settings.kv_layout), InnerShape(engine_settings.kv_page)
            ),
            load_timeout_s=c.tiers.onboard_timeout_s,
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
            flush_interval_s=bus.event_flush_s or MIN_FLUSH_S,
        )
        return RankRunner(
            rank,
            self._incarnation,
            engine,
            events,
            LocalIndex(journal),
            self._subjects.load(rank),
            load_interval_s=c.agent.load_interval_s,
            max_waiting=engine_settings.max_waiting_requests,
            beacons=self._beacons,
        )


def _memory(manager: KvBlockManager) -> RankMemory:
    device = manager.block_sets()[CacheLevel.G1]
    assert device.memory.physical is not None
    return RankMemory(device.blocks.pool, device.memory.physical, manager.stack)


def _model_config(config: EngineSettings) -> ModelConfig:
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
