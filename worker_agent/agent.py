"""The agent process: who is made of whom, who runs when, and how it stops.

    run ─┬─ HTTP server
         ├─ one runner a rank, all computing on one thread
         └─ bus: connect ▶ look, refuse a twin, claim ▶ renew, events, loads, answers, control
                                                        again when closed

It stops in the order in which it is depended on: first routers forget it, then requests end, then
the server closes.
"""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from secrets import randbits

import torch

from router.errors import LogConflictError, TwinError
from router.process.serving import HttpServer, endpoint_of, listening
from router.protocol.catalogue import WorkerAnnouncement, encode_entry, worker_key
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.announcer import Announcer
from router.publisher.beacons import HeardBeacons
from router.publisher.bus import Bus, StreamLimits, live_on_bus, until_closed
from router.publisher.events import MIN_FLUSH_S, KvEventPublisher
from router.publisher.journal import EventJournal
from router.publisher.local_index import LocalIndex
from router.publisher.transport import NatsTransport
from worker_agent.config import AgentConfig
from worker_agent.control import (
    answer_checkpoint_requests,
    answer_pings,
    follow_fleet_size,
    listen_for_beacons,
    listen_for_pings,
    refuse_twin,
)
from worker_agent.engine.model import Model, ModelConfig
from worker_agent.engine.reference import EngineConfig, ReferenceEngine
from worker_agent.runner import RankRunner
from worker_agent.server import EngineServer

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096


class WorkerAgent:
    """One worker. `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._subjects = Subjects(config.namespace)
        self._incarnation = time.time_ns() // 1000
        self._announcer: Announcer | None = None
        self._is_announced = False
        self._beacons = HeardBeacons()
        torch.set_num_threads(config.num_threads)
        model = Model(_model_config(config), _device(config.device))
        self._runners = [self._runner(model, rank) for rank in config.ranks]

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then withdraw, drain, close. Raises ConfigError, and TwinError
        in a group.
        """
        server_of = EngineServer(self._config, self._runners, lambda: self._is_announced)
        server = HttpServer(server_of.app(), MAX_CONNECTIONS)
        with (
            listening(self._config.host, self._config.http_port) as listener,
            ThreadPoolExecutor(1, "engine") as executor,
        ):
            endpoint = self._config.endpoint or endpoint_of(listener)
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve([listener]))
                running = [group.create_task(r.run(executor)) for r in self._runners]
                on_bus = group.create_task(self._follow_bus(endpoint))
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
        log.info("worker stopped")

    async def _drain(self) -> None:
        deadline_s = time.monotonic() + self._config.drain_s
        while any(runner.request_count for runner in self._runners):
            if time.monotonic() > deadline_s:
                log.warning("requests still run after %g s; closing", self._config.drain_s)
                return
            await asyncio.sleep(0.05)

    async def _follow_bus(self, endpoint: str) -> None:
        await live_on_bus(
            self._config.nats_url,
            f"worker {self._config.name}",
            self._connected,
            lambda bus: self._live(bus, endpoint),
        )

    async def _live(self, bus: Bus, endpoint: str) -> None:
        announcer = Announcer(
            bus.js,
            self._subjects,
            worker_key(self._config.id),
            self._incarnation,
            num_replicas=self._config.num_replicas,
        )
        self._announcer = announcer
        limits = StreamLimits(self._config.event_stream_max_bytes, self._config.num_replicas)
        transport = NatsTransport(bus, self._subjects, limits)
        publishers = {runner.rank: runner.events for runner in self._runners}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(until_closed(bus))
                await self._claim(bus, announcer, endpoint, group)
                group.create_task(announcer.run())
                group.create_task(answer_checkpoint_requests(bus, self._subjects, publishers))
                group.create_task(listen_for_beacons(bus, self._subjects, self._beacons))
                if not self._config.event_flush_s:
                    group.create_task(follow_fleet_size(bus, self._subjects, publishers.values()))
                for runner in self._runners:
                    group.create_task(runner.events.run(transport, announcer.verify))
                    group.create_task(runner.loads.run(transport))
                    group.create_task(runner.answers.run(bus, self._subjects))
        finally:
            self._is_announced = False
            await announcer.withdraw()

    async def _claim(
        self, bus: Bus, announcer: Announcer, endpoint: str, group: asyncio.TaskGroup
    ) -> None:
        """Of two that start at the same moment, one hears the other or finds the key taken."""
        await announcer.look()
        await refuse_twin(bus, self._subjects, self._config.id)
        pings = await listen_for_pings(bus, self._subjects, self._config.id)
        group.create_task(answer_pings(pings, self._incarnation))
        try:
            await announcer.claim(encode_entry(self._announcement(endpoint)))
        except LogConflictError as error:
            key = worker_key(self._config.id)
            raise TwinError(key, "another agent claimed it at the same moment") from error
        self._is_announced = True

    def _connected(self, connected: bool) -> None:
        """The bus may have come back without its store."""
        if connected and self._announcer is not None:
            self._announcer.renew_soon()

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
        )

    def _runner(self, model: Model, rank: Rank) -> RankRunner:
        c = self._config
        engine_config = EngineConfig(
            c.num_blocks, c.block_size, c.max_num_batched_tokens, c.max_running_requests
        )
        multiplier = randbits(64) | 1
        journal = EventJournal(rank, self._incarnation, c.identity, multiplier=multiplier)
        events = KvEventPublisher(
            journal,
            self._subjects.events(rank),
            flush_interval_s=c.event_flush_s or MIN_FLUSH_S,
        )
        return RankRunner(
            rank,
            self._incarnation,
            ReferenceEngine(model, engine_config),
            events,
            LocalIndex(journal),
            self._subjects.load(rank),
            load_interval_s=c.load_interval_s,
            max_waiting=c.max_waiting_requests,
            beacons=self._beacons,
        )


def _model_config(config: AgentConfig) -> ModelConfig:
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
