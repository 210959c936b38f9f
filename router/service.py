"""The router process: a hosted core, its commands over HTTP and NATS, and its announcement."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from router.bus_errors import BusUnavailableError
from router.commands import Commands
from router.config import RouterConfig
from router.core import RouterCore
from router.core_host import CoreHost, Task
from router.dashboard.dashboard import Dashboard
from router.dynamo.attach import dynamo_follower
from router.http.api import Api
from router.http.front import Front
from router.http.hot import HotRoutes
from router.index_rpc import IndexRpc
from router.indexer.selection import make_indexer
from router.installed_policies import every_policy
from router.lookups import Lookups
from router.metrics import RouterMetrics
from router.optional_parts import make_decision_log, make_sessions, make_tracer
from router.prediction_metrics import PredictionCollector
from router.presence import Presence, until_informed
from router.process.effective import effective
from router.process.settings import NO_OTHERS, Loaded
from router.protocol.catalogue import (
    Lifecycle,
)
from router.publisher.bus import Bus
from router.registrations import complete_worker
from router.replica import Replica
from router.replica_metrics import ReplicaMetrics
from router.rpc.service import Rpc
from router.selections import Selections
from router.session_binder import SessionBinder
from router.session_commands import SessionCommands
from router.shadow import Shadow
from router.shadow_commands import ShadowCommands
from router.shadow_metrics import ShadowCollector
from router.state_metrics import SelectionCollector
from router.watch import Watch
from router.worker_commands import WorkerCommands

if TYPE_CHECKING:  # the extra `otel` may not be installed; few routers look for engines
    from router.discovery.discovery import Discovery


class RouterService:
    """One router. `run` returns after `stop` is set and everything is closed.

    `core`: another one than a router usually makes for itself. `sources`: of each setting that
    somebody set, where.
    """

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore | None = None,
        *,
        sources: Mapping[str, str] = NO_OTHERS,
    ) -> None:
        self._config = config
        self._settings = effective(config, sources)
        self._incarnation = time.time_ns() // 1000
        self._interface: tuple[Api, Front] | tuple[()] = ()
        core = core or _core(config)
        self._host = CoreHost(
            "router",
            config,
            core,
            make_worker=partial(complete_worker, needs_events=core.reads_events),
            needs_workers=True,
            initial_workers=config.min_initial_workers,
            on_reconnect=self._note_reconnected,
            on_drain=self._drain,
            on_leave=self._leave,
        )
        self._host.status.answers_on_bus = not self._host.status.has_bus
        shadow = Shadow(time.monotonic()) if config.shadow else None
        PredictionCollector(core.closed_loop, self._host.metrics, config.metrics_max_ranks)
        self._presence = Presence(config, self._incarnation, self._host.subjects)
        self._sessions = make_sessions(config, self._host.metrics)
        self._decision_log = make_decision_log(config, core, self._host.metrics)
        self._tracer = make_tracer(config, self._host.metrics)
        self._watch = Watch(self._host.metrics.decisions, self._decision_log, self._tracer)
        self._commands = self._make_commands(core, shadow)
        self._dashboard = Dashboard(
            config,
            core,
            self._host.status,
            self._host.metrics,
            self._host.timeline,
            self._commands,
            self._watch,
        )
        self._dynamo = dynamo_follower(
            config, core, self._host.outbox, self._host.metrics, shadow, self._incarnation
        )
        self._discovery = self._make_discovery()
        self._replica = self._make_replica(core) if config.shares_reservations else None
        told = (self._host.metrics, self._host.subjects, self._host.edge.guard)
        self._rpc = Rpc(self._commands, *told, config)
        lookups = Lookups(core, frequency_window_s=0.0)
        self._index_rpc = IndexRpc(core, lookups, *told, config.max_bus_requests)

    @property
    def metrics(self) -> RouterMetrics:
        """What this router counts."""
        return self._host.metrics

    def reconfigure(self, loaded: Loaded[RouterConfig]) -> None:
        """Go on with other settings, those of `reload.LIVE`."""
        self._settings.update(effective(loaded.config, loaded.sources))
        self._host.reconfigure(loaded.config)
        self._rpc.reconfigure(loaded.config)
        self._dashboard.pages.reconfigure(loaded.config)
        for each in self._interface:
            each.reconfigure(loaded.config)

    def reread(self) -> list[str]:
        """Read files that settings name again; what came of it, in words."""
        return self._host.edge.reload()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then not ready, drain, close. Raises ConfigError."""
        host = self._host
        workers = WorkerCommands(
            host.core,
            host.registrations,
            host.registrar,
            host.engines.view,
            self._order_worker,
        )
        api = Api(
            self._config,
            self._commands,
            workers,
            host.status,
            host.metrics,
            host.edge.guard,
            lambda: list(host.registry.routers()),
            self._settings,
        )
        hot = HotRoutes(self._commands, host.edge.guard)
        app = api.app()
        self._dashboard.pages.add_to(app)
        front = Front(app, self._config, host.metrics, host.edge.guard, hot)
        self._interface = (api, front)
        try:
            await self._host.run(stop, front, self._live, self._background)
        finally:
            if self._sessions is not None:
                await self._sessions.close()

    def _make_commands(self, core: RouterCore, shadow: Shadow | None) -> Commands:
        outbox, metrics = self._host.outbox, self._host.metrics
        watch = self._watch
        selections = Selections(self._config.selection_limits)
        SelectionCollector(selections, metrics)
        if shadow is not None:
            ShadowCollector(shadow, metrics)
            return ShadowCommands(core, outbox, metrics, shadow, watch, selections)
        if self._sessions is None:
            return Commands(core, outbox, metrics, watch, selections)
        is_hard = self._config.session_affinity_mode == "hard"
        binder = SessionBinder(core, self._sessions, is_hard=is_hard)
        return SessionCommands(core, outbox, metrics, binder, watch, selections)

    def _make_discovery(self) -> "Discovery | None":
        if self._config.discovery == "none":
            return None
        from router.discovery.discovery import Discovery

        return Discovery(self._config, self._host, Random())

    def _make_replica(self, core: RouterCore) -> Replica:
        host = self._host
        return Replica(
            core,
            self._config.router_id,
            self._incarnation,
            host.outbox,
            host.status,
            ReplicaMetrics(core, host.metrics.registry),
            host.subjects,
        )

    def _background(self) -> Iterable[Task]:
        yield self._dashboard.streams.run()
        if self._replica is not None:
            yield self._replica.tell_forever()
        if self._dynamo is not None:
            yield self._dynamo.run()
        if self._discovery is not None:
            yield self._discovery.run()
        if self._decision_log is not None:
            yield self._decision_log.run()
        if self._tracer is not None:
            yield self._tracer.run()

    def _live(self, bus: Bus, endpoint: str) -> Iterable[Task]:
        yield self._presence.run(bus, endpoint)
        yield self._answer(bus)
        yield self._index_rpc.run(bus)
        if self._replica is not None:
            yield self._follow_replicas(self._replica, bus)
        yield self._host.take_snapshots(bus, self._is_first_router)

    async def _answer(self, bus: Bus) -> None:
        """Take turns with the other routers."""
        await until_informed(self._host.core, self._host.status)
        if not self._presence.is_leaving:
            await self._rpc.run(bus, self._note_answering)

    def _note_answering(self) -> None:
        self._host.status.answers_on_bus = True

    async def _follow_replicas(self, replica: Replica, bus: Bus) -> None:
        """Others' reservations are booked on ranks, which have to be known first."""
        await self._host.registry.caught_up.wait()
        await replica.run(bus)

    async def _drain(self) -> None:
        """Refuse the requests that wait, leave the writing of snapshots to other routers, and
        answer what has come over the bus.
        """
        self._commands.drain()
        self._dashboard.streams.close()
        self._presence.leave()
        await asyncio.gather(self._rpc.drain(), self._index_rpc.drain())

    async def _leave(self) -> None:
        """Requests that run on are another router's from now on."""
        if self._replica is not None:
            await self._replica.hand_over()

    def _is_first_router(self) -> bool:
        """Of the live ones, that of the lowest id."""
        first = next(self._host.registry.routers(), None)
        return first is not None and first.router_id == self._config.router_id

    def _note_reconnected(self) -> None:
        self._presence.renew_soon()

    async def _order_worker(self, worker_id: int, lifecycle: Lifecycle) -> None:
        if not self._host.status.has_bus:
            await self._host.registrar.order(worker_id, lifecycle)
            return
        bus = self._host.bus
        if bus is None or not bus.client.is_connected:
            raise BusUnavailableError("orders about workers are kept there")
        await self._host.registry.order(bus, worker_id, lifecycle)


def _core(config: RouterConfig) -> RouterCore:
    index = config.index
    return RouterCore(config.core, lambda: make_indexer(index), Random(), every_policy())
