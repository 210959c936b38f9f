"""A core in its process: fed from the bus, ticking, served over HTTP. For routers and indexers.

    run ─┬─ HTTP server                              from the first moment
         ├─ ticks                                    silence, expiry, overdue checkpoints
         ├─ engines                                  those with sockets read by this process
         └─ bus: connect ▶ registry, events, loads, outbox, and further tasks of a connection
                                                     again when closed

One TaskGroup owns every task: an unhandled exception ends the process.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from random import Random

from msgspec import Struct

from router.api.http.front import Front
from router.config.indexer import IndexerConfig
from router.config.router import RouterConfig
from router.core.commands import MarkBeacon, SetConnected, Tick, Tidy
from router.core.core import RouterCore
from router.core.registrations import Registrations
from router.discovery.registration import MakeWorker, Registrar
from router.discovery.worker_watch import WorkerWatch
from router.ingest.data_dir import DataDir
from router.ingest.effect_runner import EffectRunner
from router.ingest.engine_polls import PollDuties
from router.ingest.engines import Engines
from router.observability.capacity_metrics import expose_capacity
from router.observability.event_timeline import EventTimeline
from router.observability.health import ServiceStatus
from router.observability.metrics import RouterMetrics
from router.observability.rank_metrics import expose_ranks
from router.observability.state_metrics import REGISTRATION_METRICS, expose_state
from router.protocol.subjects import Subjects
from router.publisher.follower.loop_slices import SliceScheduler
from router.runtime.bus.connection import (
    Bus,
    live_on_bus,
)
from router.runtime.bus.errors import BusError
from router.runtime.http_server.limits import HttpLimits
from router.runtime.http_server.server import (
    SHUTDOWN_S,
    HttpServer,
    endpoint_of,
    listening,
    serve_until,
)
from router.runtime.process.metrics import expose
from router.runtime.process.ticks import PauseDetector, next_tick
from router.runtime.security.edge import EDGE_METRICS, Edge
from router.runtime.security.nats_access import nats_access
from router.service.bus_feed import BusFeed, Task

log = logging.getLogger(__name__)

TICK_S = 0.2

HEARD_S = 1.0
"""The time after a pause of the process in which every live worker reports again."""

CATCH_UP_S = 5.0
"""The limit of the time a restarted process waits for its registered engines to be ready."""

TIDY_SLICES = 256
"""Limit of the slices tidied after a tick; the rest waits for the next tick."""


async def _nothing() -> None:
    """Finish nothing: the default of `on_drain`, `on_close` and `on_leave`."""


class Hooks(Struct, frozen=True):
    """Calls of a process at turns of its life.

    `on_reconnect` is called when a lost bus is back. `on_drain` is called when the process is about
    to end, and has `SHUTDOWN_S` for what is in flight. `on_close` is called at the same time, and
    returns when the process's other servers have closed, which limit their time themselves.
    `on_leave` is called after that, once callers had `drain_s` to go elsewhere.
    """

    on_reconnect: Callable[[], None] = lambda: None
    on_drain: Callable[[], Awaitable[None]] = _nothing
    on_close: Callable[[], Awaitable[None]] = _nothing
    on_leave: Callable[[], Awaitable[None]] = _nothing


class CoreHost:
    """One core and the adapters that each process has around it.

    `kind`: the name of the process in logs.
    """

    def __init__(
        self,
        kind: str,
        config: RouterConfig | IndexerConfig,
        core: RouterCore,
        *,
        make_worker: MakeWorker,
        needs_workers: bool,
        initial_workers: int = 0,
        hooks: Hooks,
        duties: PollDuties | None = None,
    ) -> None:
        self._kind, self._config, self._hooks = kind, config, hooks
        self.duties = duties or PollDuties(None)
        self.core = core
        self.subjects = Subjects(config.bus.namespace)
        self.status = ServiceStatus(
            config.bus.nats_url, needs_workers=needs_workers, initial_workers=initial_workers
        )
        self.edge = Edge(config.security)
        self._access = nats_access(config.nats, config.bus.nats_url)
        self.metrics = RouterMetrics()
        self.timeline = EventTimeline(time.time)
        data_dir = config.service.data_dir
        self._data_dir = DataDir(Path(data_dir)) if data_dir else None
        turns = SliceScheduler()
        self.engines = self._make_engines(turns)
        self.effect_runner = EffectRunner(
            self.subjects,
            self.metrics,
            has_bus=self.status.has_bus,
            republish=self.engines.republish,
            timeline=self.timeline,
        )
        self.registrations = Registrations(core, config.service.max_registered_ranks)
        self.registrar = self._make_registrar(make_worker)
        self.feed = self._make_feed(turns)
        self._watch = WorkerWatch(
            core,
            self.engines,
            self.timeline,
            self.registrar.held,
            Random(),
            asks_servers=config.service.check_workers,
        )
        self._expose_state()
        self.bus: Bus | None = None
        self.endpoint = ""

    def _make_engines(self, turns: SliceScheduler) -> Engines:
        service = self._config.service
        return Engines(
            self.core,
            self.metrics,
            self._data_dir,
            turns,
            max_ranks=service.max_registered_ranks,
            metrics_max_ranks=service.metrics_max_ranks,
        )

    def _make_registrar(self, make_worker: MakeWorker) -> Registrar:
        return Registrar(
            self.core,
            self.registrations,
            self.engines,
            self.effect_runner,
            self._data_dir,
            make_worker,
            keeps_orders=not self.status.has_bus,
            allow_public=self._config.service.allow_public_engines,
        )

    def _make_feed(self, turns: SliceScheduler) -> BusFeed:
        return BusFeed(
            self.core,
            self.effect_runner,
            self.status,
            self.metrics,
            self.subjects,
            self._config.bus,
            turns,
            self.duties,
        )

    def _expose_state(self) -> None:
        """Add the metrics that are read from the state when they are scraped."""
        registry, core = self.metrics.registry, self.core
        expose(registry, "kv_router_", EDGE_METRICS, self.edge)
        expose_state(registry, core, self.status)
        expose_ranks(registry, core, self._config.service.metrics_max_ranks)
        expose_capacity(registry, core)
        expose(registry, "kv_router_", REGISTRATION_METRICS, self.registrations)

    def reconfigure(self, config: RouterConfig | IndexerConfig) -> None:
        """Apply changed settings; see `settings.LIVE`."""
        self._config = config
        self.edge.reconfigure(config.security)

    async def run(
        self,
        stop: asyncio.Event,
        app: Front,
        live: Callable[[Bus, str], Iterable[Task]],
        background: Callable[[], Iterable[Task]] = tuple,
    ) -> None:
        """Serve until `stop` is set; then become not ready, drain and close. Raises ConfigError.

        `live`: further tasks of each connection, made from the bus and the endpoint listened on;
        `background`: tasks that run once, for as long as the process.
        """
        config = self._config
        with (
            self._data_dir.ours() if self._data_dir else nullcontext(),
            listening(config.security.host, config.http.http_port) as listener,
        ):
            self._restore()
            endpoint = endpoint_of(listener, has_tls=self.edge.tls is not None)
            self.endpoint = endpoint
            log.info("%s %s listens on %s", self._kind, config.service.name, endpoint)
            most = config.service.max_connections
            limits = HttpLimits.of(config.http, config.security, most)
            server = HttpServer(app, limits, self.edge.tls, self._refused, app)
            tasks = [self._tick_forever(), self.engines.run(), self.edge.run(), *background()]
            tasks.append(self._watch.run())
            if self.status.has_bus:
                tasks.append(self._follow_bus(live, endpoint))
            else:
                log.info("no nats_url is set: only workers registered over HTTP are used")
                self.feed.registry.caught_up.set()
                self.core.handle(SetConnected(True), time.monotonic())
            await serve_until(stop, server, listener, tasks, self._drain)
        log.info("%s stopped", self._kind)

    def _refused(self, code: str) -> None:
        self.metrics.refusals.labels("http", code).inc()

    def _restore(self) -> None:
        restored = self.registrar.restore()
        if restored:
            log.info("%d workers restored from the data folder", restored)
            self.status.engines_caught_up = False

    async def _drain(self) -> None:
        drain_s = self._config.service.drain_s
        log.info("draining for %g s", drain_s)
        self.status.is_draining = True
        draining = self._finish(self._hooks.on_drain)
        await asyncio.gather(draining, asyncio.sleep(drain_s), self._hooks.on_close())
        await self._finish(self._hooks.on_leave)

    async def _finish(self, finish: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await finish()
        except (BusError, TimeoutError) as error:
            log.warning("requests in flight not finished: %s", error or "timed out")

    async def _tick_forever(self) -> None:
        patience_s = time.monotonic() + CATCH_UP_S
        standstill = PauseDetector(HEARD_S, time.monotonic())
        while True:
            await next_tick(TICK_S)
            now_s = time.monotonic()
            if now_s > patience_s or self.engines.is_caught_up():
                self.status.engines_caught_up = True
            effects = self.core.handle(Tick(), now_s)[1] if standstill.is_over(now_s) else []
            self.effect_runner.perform([*effects, *self.core.handle(MarkBeacon(), now_s)[1]])
            for _ in range(TIDY_SLICES):
                if not self.core.handle(Tidy(), time.monotonic())[0]:
                    break
                await asyncio.sleep(0)

    async def _follow_bus(self, live: Callable[[Bus, str], Iterable[Task]], endpoint: str) -> None:
        async def live_here(bus: Bus) -> None:
            self.bus = bus
            async with asyncio.TaskGroup() as group:
                for task in (*self.feed.tasks(bus), *live(bus, endpoint)):
                    group.create_task(task)

        name = f"{self._kind} {self._config.service.name}"
        url = self._config.bus.nats_url
        await live_on_bus(url, name, self._connected, live_here, self._access)

    def _connected(self, connected: bool) -> None:
        self.core.handle(SetConnected(connected), time.monotonic())
        if connected:
            self.timeline.note("bus_connected", "good", "", "connected to NATS")
            self._hooks.on_reconnect()
        else:
            self.timeline.note("bus_lost", "fault", "", "lost the connection to NATS")
            self.metrics.bus_losses.inc()
