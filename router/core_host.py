"""A core in its process: fed by the bus, ticking, served over HTTP. Routers and indexers are both.

    run ─┬─ HTTP server                              up from the first moment
         ├─ ticks                                    silence, expiry, overdue checkpoints
         ├─ engines                                  those whose sockets are read here
         └─ bus: connect ▶ registry, events, loads, outbox, and what else lives on a connection
                                                     again when closed

One TaskGroup owns every task: what crashes takes the process down, visibly.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from router.bus_errors import BusError
from router.core import RouterCore
from router.data_dir import DataDir
from router.engines import Engines
from router.http.front import Front
from router.http.hot_protocol import HotProtocol
from router.metrics import RouterMetrics
from router.nats_stream import NatsStream
from router.outbox import Outbox
from router.process.http_limits import HttpLimits
from router.process.moments import Standstill, next_moment
from router.process.serving import SHUTDOWN_S, HttpServer, endpoint_of, listening, serve_until
from router.protocol.subjects import Subjects
from router.protocol.values import StreamPosition
from router.publisher.bus import (
    Bus,
    StreamLimits,
    ensure_event_stream,
    live_on_bus,
    until_closed,
)
from router.publisher.turns import Turns
from router.rank_metrics import RankCollector
from router.registrar import MakeWorker, Registrar
from router.registrations import Registrations
from router.registry import Registry
from router.security.edge import Edge
from router.security.metrics import EdgeCollector
from router.security.nats_access import nats_access
from router.service_config import ServiceConfig
from router.snapshots import Snapshots, SnapshotSettings
from router.state_metrics import RegistrationCollector, StateCollector
from router.status import ServiceStatus
from router.subscriber import Subscriber
from router.timeline import Timeline

log = logging.getLogger(__name__)

TICK_S = 0.2

HEARD_S = 1.0
"""After a standstill: everybody who lives has reported by then."""

CATCH_UP_S = 5.0
"""How long a restarted process waits for the engines registered before, until it is ready."""

TIDY_SLICES = 256
"""Slices of tidying after a tick, at most: what is left waits for the next one."""

Task: TypeAlias = Coroutine[Any, Any, None]


async def _nothing() -> None:
    """Where nothing is to be finished."""


class CoreHost:
    """One core and the adapters that every process has around it, for others to build on.

    `kind` is what the process calls itself. `on_reconnect` is called when a lost bus is back,
    `on_drain` when the process is about to end, which then has `SHUTDOWN_S` for what is in flight,
    and `on_leave` once callers had `drain_s` to go elsewhere.
    """

    def __init__(
        self,
        kind: str,
        config: ServiceConfig,
        core: RouterCore,
        *,
        make_worker: MakeWorker,
        needs_workers: bool,
        initial_workers: int = 0,
        on_reconnect: Callable[[], None] = lambda: None,
        on_drain: Callable[[], Awaitable[None]] = _nothing,
        on_leave: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self._kind = kind
        self._config = config
        self._on_reconnect = on_reconnect
        self._on_drain = on_drain
        self._on_leave = on_leave
        self.core = core
        self.subjects = Subjects(config.namespace)
        self.status = ServiceStatus(
            config.nats_url, needs_workers=needs_workers, initial_workers=initial_workers
        )
        self.edge = Edge(config)
        self._access = nats_access(config)
        self.metrics = RouterMetrics()
        EdgeCollector(self.edge, self.metrics.registry)
        StateCollector(core, self.status, self.metrics)
        RankCollector(core, self.metrics, config.metrics_max_ranks)
        self._data_dir = DataDir(Path(config.data_dir)) if config.data_dir else None
        turns = Turns()
        self.engines = Engines(
            core,
            self.metrics,
            self._data_dir,
            turns,
            max_ranks=config.max_registered_ranks,
            metrics_max_ranks=config.metrics_max_ranks,
        )
        self.timeline = Timeline(time.time)
        self.outbox = Outbox(
            self.subjects,
            self.metrics,
            has_bus=self.status.has_bus,
            retell=self.engines.retell,
            timeline=self.timeline,
        )
        self.registrations = Registrations(core, config.max_registered_ranks)
        RegistrationCollector(self.registrations, self.metrics)
        self.registrar = Registrar(
            core,
            self.registrations,
            self.engines,
            self.outbox,
            self._data_dir,
            make_worker,
            keeps_orders=not self.status.has_bus,
            allow_public=config.allow_public_engines,
        )
        shared = (core, self.outbox, self.status, self.metrics, self.subjects)
        self.registry = Registry(*shared, config.num_replicas)
        self._stream_limits = StreamLimits(config.event_stream_max_bytes, config.num_replicas)
        self._subscriber = Subscriber(*shared, turns)
        settings = SnapshotSettings(
            config.snapshot_threshold, config.reset_state, config.num_replicas
        )
        self._snapshots = Snapshots(core, self.metrics, self.subjects, settings)
        self.bus: Bus | None = None

    def reconfigure(self, config: ServiceConfig) -> None:
        """Go on with other settings; see `reload.LIVE`."""
        self._config = config

    async def run(
        self,
        stop: asyncio.Event,
        app: Front,
        live: Callable[[Bus, str], Iterable[Task]],
        background: Callable[[], Iterable[Task]] = tuple,
    ) -> None:
        """Serve until `stop` is set; then not ready, drain, close. Raises ConfigError.

        `live`: what else lives on each connection, given it and the endpoint listened on;
        `background`: what runs once, beside everything.
        """
        with (
            self._data_dir.ours() if self._data_dir else nullcontext(),
            listening(self._config.host, self._config.http_port) as listener,
        ):
            self._restore()
            endpoint = endpoint_of(listener, has_tls=self.edge.tls is not None)
            log.info("%s %s listens on %s", self._kind, self._config.name, endpoint)
            limits = HttpLimits.of(self._config, self._config.max_connections)
            server = HttpServer(app, limits, self.edge.tls, self._refused, HotProtocol)
            tasks = [self._tick_forever(), self.engines.run(), self.edge.run(), *background()]
            if self.status.has_bus:
                tasks.append(self._follow_bus(live, endpoint))
            else:
                log.info("no nats_url: workers are those registered over HTTP")
                self.registry.caught_up.set()
                self.core.set_connected(True, time.monotonic())
            await serve_until(stop, server, listener, tasks, self._drain)
        log.info("%s stopped", self._kind)

    def _refused(self, code: str) -> None:
        self.metrics.refusals.labels("http", code).inc()

    def _restore(self) -> None:
        restored = self.registrar.restore()
        if restored:
            log.info("%d workers were registered before, and are again", restored)
            self.status.engines_caught_up = False

    async def _drain(self) -> None:
        log.info("draining for %g s", self._config.drain_s)
        self.status.is_draining = True
        await asyncio.gather(self._finish(self._on_drain), asyncio.sleep(self._config.drain_s))
        await self._finish(self._on_leave)

    async def _finish(self, finish: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await finish()
        except (BusError, TimeoutError) as error:
            log.warning("not everything in flight is finished: %s", error or "it took too long")

    async def _tick_forever(self) -> None:
        patience_s = time.monotonic() + CATCH_UP_S
        standstill = Standstill(HEARD_S, time.monotonic())
        while True:
            await next_moment(TICK_S)
            now_s = time.monotonic()
            if now_s > patience_s or self.engines.is_caught_up():
                self.status.engines_caught_up = True
            effects = self.core.tick(now_s) if standstill.is_over(now_s) else []
            self.outbox.perform([*effects, self.core.beacon(now_s)])
            for _ in range(TIDY_SLICES):
                if not self.core.tidy(time.monotonic()):
                    break
                await asyncio.sleep(0)

    async def _follow_bus(self, live: Callable[[Bus, str], Iterable[Task]], endpoint: str) -> None:
        async def live_here(bus: Bus) -> None:
            self.bus = bus
            async with asyncio.TaskGroup() as group:
                for task in (*self._feed(bus), *live(bus, endpoint)):
                    group.create_task(task)

        name = f"{self._kind} {self._config.name}"
        url = self._config.nats_url
        await live_on_bus(url, name, self._connected, live_here, self._access)

    def _feed(self, bus: Bus) -> Iterable[Task]:
        yield until_closed(bus)
        yield self.registry.run(bus)
        yield self._events_after_registry(bus)
        yield self._subscriber.run_loads(bus)
        yield self.outbox.run(bus, lambda worker_id: self.registry.fetch_worker(bus, worker_id))

    async def _events_after_registry(self, bus: Bus) -> None:
        """Events of ranks nobody announced would be dropped."""
        await self.registry.caught_up.wait()
        if self.core.reads_events:
            ensure = partial(ensure_event_stream, bus.js, self.subjects, self._stream_limits)
            stream = NatsStream(bus, self.subjects.event_stream, ensure)
            if self._subscriber.position is None:
                end = (await stream.state()).end
                self._subscriber.position = await self._snapshots.restore(bus, end)
            await self._subscriber.run_events(stream)
        else:
            self.status.events_caught_up = True

    async def take_snapshots(self, bus: Bus, is_our_turn: Callable[[], bool]) -> None:
        """Write a snapshot whenever one is due and it is our turn, until cancelled."""

        def position() -> StreamPosition | None:
            return self._subscriber.position if self.status.events_caught_up else None

        if self.core.reads_events:
            await self._snapshots.run(bus, position, is_our_turn)

    def _connected(self, connected: bool) -> None:
        self.core.set_connected(connected, time.monotonic())
        if connected:
            self.timeline.note("bus_connected", "good", "", "connected to NATS")
            self._on_reconnect()
        else:
            self.timeline.note("bus_lost", "fault", "", "the connection to NATS is lost")
            self.metrics.bus.losses.inc()
