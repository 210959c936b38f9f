"""The router process: a hosted core, its commands over HTTP and NATS, and its announcement."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from random import Random
from secrets import randbits
from typing import TYPE_CHECKING

from router.api.commands import Commands
from router.api.http.api import Api
from router.api.http.front import Front
from router.api.http.hot_routes import HotRoutes
from router.api.http.web import ReadyProbe
from router.api.index_queries import Lookups
from router.api.rpc.index_service import IndexRpc
from router.api.rpc.service import Rpc
from router.api.sessions import SessionStep
from router.api.shadow import PolicyShadowStep, RouterShadowStep, ShadowStep
from router.api.workers import WorkerCommands
from router.config.core import make_core
from router.config.load import changed
from router.config.router import RouterConfig
from router.core.commands import Reconfigure
from router.core.core import RouterCore
from router.core.effects import ShareLoad
from router.core.registered_workers import complete_worker
from router.core.selections import Selections
from router.core.views.shadow import Shadow
from router.dashboard.dashboard import Dashboard
from router.discovery.attach.announcer import Announcer
from router.discovery.attach.attachments import Attachments
from router.discovery.attach.visitor import EngineVisitor
from router.discovery.dynamo.attach import dynamo_follower, dynamo_settings
from router.discovery.dynamo.follower import DynamoFollower
from router.discovery.router_presence import RouterPresence, until_informed
from router.ingest.engine_polls import EnginePolls, PollDuties
from router.ingest.replica_sync import NatsReplicas, ReplicaSync
from router.observability.accuracy_metrics import expose_accuracy
from router.observability.decision_observer import DecisionObserver
from router.observability.recording import RECORDING_METRICS, Recording
from router.observability.replica_metrics import ReplicaMetrics
from router.observability.state_metrics import expose_selections, expose_shadow, expose_splits
from router.protocol.catalogue import Lifecycle, RouterAnnouncement
from router.runtime.bus.connection import Bus
from router.runtime.bus.errors import BusUnavailableError
from router.runtime.http_server.server import endpoint_of
from router.runtime.process.loading import NO_OTHERS, Loaded
from router.runtime.process.metrics import expose
from router.runtime.process.reload import Outcome
from router.runtime.process.settings import effective
from router.service.bus_feed import Task
from router.service.extras import (
    make_decision_log,
    make_discovery,
    make_peers,
    make_pool,
    make_sessions,
    make_tracer,
    next_steps,
)
from router.service.host import CoreHost, Hooks

if TYPE_CHECKING:  # few routers look for engines, or are an OpenAI endpoint too
    from router.service.openai import RouterEndpoint


log = logging.getLogger(__name__)

FIRST_VISITS_S = 5.0
"""The time for which the addresses of this process wait for the first lines about engines."""


class RouterService:
    """One router. `run` returns after `stop` is set and everything is closed.

    `core`: a core in place of the default one. `sources`: where each setting was set. `host`: the
    core in this process, with what it needs. `commands`: those of callers. `recording`: of the
    core's commands and decisions. `show`: prints a line on a terminal.
    """

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore | None = None,
        *,
        sources: Mapping[str, str] = NO_OTHERS,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._show = show
        seed = randbits(53)
        core = core or make_core(config, Random(seed))
        self.recording = Recording(config, core, seed)
        if config.observability.record_to:
            self.recording.begin()
        self._unused = config.unused(core.policies.available)
        self._settings = effective(config, sources, self._unused)
        self._incarnation = time.time_ns() // 1000
        self._interface: tuple[Api, Front] | None = None
        self.host = CoreHost(
            "router",
            config,
            core,
            make_worker=complete_worker,
            needs_workers=True,
            duties=PollDuties(config.router_id),
            initial_workers=config.placement.min_initial_workers,
            hooks=Hooks(self._note_reconnected, self._drain, self._close, self._leave),
        )
        self.host.status.answers_on_bus = not self.host.status.has_bus
        self._shadow = Shadow(time.monotonic())
        expose_shadow(self.host.metrics.registry, self._shadow)
        expose_accuracy(
            self.host.metrics.registry, core.closed_loop, config.service.metrics_max_ranks
        )
        expose(self.host.metrics.registry, "kv_router_", RECORDING_METRICS, self.recording)
        self._presence = self._make_presence()
        self._sessions = make_sessions(config.sessions, config.bus.namespace, self.host.metrics)
        self._decision_log = make_decision_log(config.observability, core, self.host.metrics)
        self._tracer = make_tracer(config.observability, config.service.name, self.host.metrics)
        self._watch = DecisionObserver(
            self.host.metrics.decisions, self._decision_log, self._tracer
        )
        self.commands = self._make_commands(core)
        self._dashboard = self._make_dashboard()
        self._dynamo = self._make_dynamo(core)
        self._attachments = self._make_attachments()
        self._pool = make_pool(config.cluster, self.host.status)
        self._discovery = make_discovery(config, self.host, self._pool, self._attachments)
        self._polls = self._make_polls()
        self._openai = self._make_openai()
        self._replica = self._make_replica(core) if config.shares_reservations else None
        self._peers, self._peer_watch = make_peers(
            config, self._incarnation, self.host.metrics, self.host.status
        )
        if self._peers is not None:
            self.host.effect_runner.add_replicas(self._peers.offer)
        told = (self.host.metrics, self.host.subjects, self.host.edge.guard)
        self._rpc = Rpc(self.commands, *told, config.bodies, config.bus.max_bus_requests)
        lookups = Lookups(core, frequency_window_s=0.0)
        self._index_rpc = IndexRpc(core, lookups, *told, config.bus.max_bus_requests)

    def reconfigure(self, loaded: Loaded[RouterConfig]) -> None:
        """Apply changed settings, those of `settings.LIVE`. Raises ConfigError; then none."""
        config = changed(self._config, loaded)
        splits, shadow = config.policy.splits, self.commands.shadow
        if config.policy.shadow_policy != self._config.policy.shadow_policy:
            shadow = self._shadow_step(config)
        self._reconfigure_core(config)
        self.commands.splits.splits, self.commands.shadow = splits, shadow
        self._config = config
        before, self._unused = self._unused, config.unused(self.host.core.policies.available)
        self._warn([each for each in self._unused.values() if each not in before.values()])
        self._settings.update(effective(config, loaded.sources, self._unused))
        self.host.reconfigure(config)
        self._rpc.reconfigure(config.bodies)
        self._dashboard.pages.reconfigure(config.bodies)
        if self._openai is not None:
            self._openai.reconfigure(config)
        if self._interface is not None:
            api, front = self._interface
            api.reconfigure(config.bodies)
            front.reconfigure(config.http, config.bodies)

    def _warn(self, sentences: Iterable[str]) -> None:
        if text := "; ".join(sentences):
            log.warning("%s", text)

    def _reconfigure_core(self, config: RouterConfig) -> None:
        command = Reconfigure.of(config.core)
        if command == Reconfigure.of(self._config.core):
            return
        _, effects = self.host.core.handle(command, time.monotonic())
        self.recording.reconfigure(config)
        self.host.effect_runner.perform(effects)

    def reloaded(self, outcome: Outcome) -> list[str]:
        """See `Edge.reloaded`."""
        return self.host.edge.reloaded(outcome)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then not ready, drain, close. Raises ConfigError."""
        host, config = self.host, self._config
        self._warn(self._unused.values())
        workers = WorkerCommands(
            host.core,
            host.registrations,
            host.registrar,
            host.engines.view,
            self._attachments,
            self._order_worker,
        )
        api = Api(
            config.bodies,
            self.commands,
            workers,
            host.metrics,
            host.edge.guard,
            self._routers,
            self._settings,
            self.recording,
            router_id=config.router_id,
            shares_reservations=config.shares_reservations,
            streams=None if self._peers is None else self._peers.streams,
        )
        ready = ReadyProbe(host.status, host.core, workers.all)
        hot = HotRoutes(self.commands, host.edge.guard, ready.find)
        app = api.app()
        self._dashboard.pages.add_to(app)
        front = Front(app, config.http, config.bodies, host.metrics, host.edge.guard, hot.find)
        self._interface = (api, front)
        try:
            with nullcontext() if self._openai is None else self._openai.listening() as openai:
                background = partial(self._background, stop, openai)
                await self.host.run(stop, front, self._live, background)
        except BaseException:
            self.recording.end("the router failed")
            raise
        finally:
            await self.recording.finish()
            if self._sessions is not None:
                await self._sessions.close()

    def _make_presence(self) -> RouterPresence:
        config = self._config
        return RouterPresence(
            config.router_id,
            config.service.name,
            self._incarnation,
            self.host.subjects,
            config.bus.num_replicas,
        )

    def _make_dashboard(self) -> Dashboard:
        config, host = self._config, self.host
        return Dashboard(
            config.service.name,
            config.bodies,
            config.observability.max_dashboard_streams,
            host.core,
            host.status,
            host.metrics,
            host.timeline,
            self.commands,
            self._watch,
        )

    def _make_commands(self, core: RouterCore) -> Commands:
        effect_runner, metrics = self.host.effect_runner, self.host.metrics
        watch = self._watch
        selections = Selections(self._config.reservations.selection_limits)
        expose_selections(metrics.registry, selections)
        sessions = None
        if self._sessions is not None:
            sessions = SessionStep(
                core, self._sessions, selections, is_hard=self._config.sessions.is_hard
            )
        commands = Commands(
            core,
            effect_runner,
            metrics,
            watch,
            selections,
            sessions=sessions,
            shadow=self._shadow_step(self._config),
            splits=self._config.policy.splits,
        )
        expose_splits(metrics.registry, commands.splits.counts)
        return commands

    def _shadow_step(self, config: RouterConfig) -> ShadowStep | None:
        """Return the step that compares, if there is one; comparisons begin anew.

        Raises ConfigError if the second policy is unknown.
        """
        core, policy = self.host.core, config.policy.shadow_policy
        if config.dynamo.shadow:
            return RouterShadowStep(core, self.host.effect_runner, self._shadow)
        if policy:
            core.policies.configured("shadow_policy", policy)
        self._shadow.begin(policy, time.monotonic())
        return PolicyShadowStep(core, self._shadow, policy, Random()) if policy else None

    def _make_attachments(self) -> Attachments:
        host, core = self.host, self.host.core
        config, registry, random = self._config.attach, host.metrics.registry, Random()
        announcer = Announcer(core, host.timeline, self._show)
        registering = (host.registrar, host.registrations)
        visitor = EngineVisitor(config, core, *registering, host.engines.view, announcer, random)
        return Attachments(config, *registering, visitor, announcer, registry, random)

    def _make_polls(self) -> EnginePolls:
        host = self.host
        return EnginePolls(
            host.core,
            host.metrics,
            host.duties,
            self._attachments.access,
            lambda load: host.effect_runner.perform([ShareLoad(load)]),
            Random(),
        )

    def _make_openai(self) -> "RouterEndpoint | None":
        if not self._config.openai.openai_port and not self._config.picker.epp_port:
            return None
        from router.service.openai import RouterEndpoint

        return RouterEndpoint(self._config, self.host, self.commands, self._pool)

    def _make_dynamo(self, core: RouterCore) -> DynamoFollower | None:
        config, host = self._config, self.host
        shadow = self._shadow if config.dynamo.shadow else None
        settings = dynamo_settings(config.dynamo, config.bus.nats_url, config.naming)
        if settings is None:
            return None
        shared = (core, host.effect_runner, host.metrics, shadow, self._incarnation)
        return dynamo_follower(settings, config.service.name, *shared)

    def _make_replica(self, core: RouterCore) -> ReplicaSync:
        host = self.host
        return ReplicaSync(
            core,
            self._config.router_id,
            self._incarnation,
            host.effect_runner,
            host.status,
            ReplicaMetrics(core, host.metrics.registry),
            host.subjects,
        )

    def _routers(self) -> list[RouterAnnouncement]:
        """Return the routers of this namespace; without a bus, this one and those connected."""
        if self._peers is None:
            return list(self.host.feed.registry.routers())
        this = RouterAnnouncement(
            router_id=self._config.router_id,
            name=self._config.service.name,
            endpoint=self.host.endpoint,
            incarnation=self._incarnation,
        )
        return [this, *self._peers.announcements()]

    def _background(self, stop: asyncio.Event, openai: socket.socket | None) -> Iterable[Task]:
        if self._openai is not None:
            yield self._openai.run(stop, openai)
        yield self._dashboard.streams.run()
        yield self._attachments.run()
        if self._config.attach.poll_metrics:
            yield self._polls.run()
        if self._show is not None:
            yield self._show_addresses(self._show, openai)
        yield from self._share()
        for each in (self._dynamo, self._discovery, self._decision_log, self._tracer):
            if each is not None:
                yield each.run()

    def _share(self) -> Iterable[Task]:
        if self._replica is None:
            return
        yield self._replica.publish_forever()
        if self._peers is not None:
            yield self._replica.run(self._peers)
        if self._peer_watch is not None:
            yield self._peer_watch.run()

    async def _show_addresses(
        self, show: Callable[[str], None], openai: socket.socket | None
    ) -> None:
        """Show where this process listens and what to do next, below the first engines' lines."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._attachments.until_visited(), FIRST_VISITS_S)
        dashboard, at = f"dashboard  {self.host.endpoint}/", None
        if openai is not None:
            at = f"{endpoint_of(openai, has_tls=self.host.edge.tls is not None)}/v1"
            dashboard = f"OpenAI endpoint  {at}      {dashboard}"
        show(dashboard)
        models = sorted({scope.model_name for scope in self.host.core.fleet.scopes()})
        for line in next_steps(self.host.endpoint, at, models):
            show(line)

    def _live(self, bus: Bus, endpoint: str) -> Iterable[Task]:
        yield self._presence.run(bus, endpoint)
        yield self._answer(bus)
        yield self._index_rpc.run(bus)
        if self._replica is not None:
            yield self._follow_replicas(self._replica, bus)
        yield self.host.feed.take_snapshots(bus, self._is_first_router)

    async def _answer(self, bus: Bus) -> None:
        """Respond to requests on the bus, sharing them with the other routers."""
        await until_informed(self.host.core, self.host.status)
        if not self._presence.is_leaving:
            await self._rpc.run(bus, self._note_answering)

    def _note_answering(self) -> None:
        self.host.status.answers_on_bus = True

    async def _follow_replicas(self, replica: ReplicaSync, bus: Bus) -> None:
        """Follow the replicas once the ranks of their reservations are known."""
        await self.host.feed.registry.caught_up.wait()
        host = self.host
        await replica.run(NatsReplicas(bus, host.subjects, self._config.router_id))

    async def _drain(self) -> None:
        """Refuse waiting requests, leave snapshots to other routers, and finish bus requests."""
        self.commands.drain()
        self._dashboard.streams.close()
        self._presence.leave()
        await asyncio.gather(self._rpc.drain(), self._index_rpc.drain())

    async def _close(self) -> None:
        """Wait for the OpenAI endpoint: what it has booked is freed, and not handed over."""
        if self._openai is not None:
            await self._openai.until_closed()

    async def _leave(self) -> None:
        """Hand over the running requests to other routers."""
        try:
            if self._replica is not None:
                await self._replica.hand_over()
        finally:
            if self._peers is not None:
                self._peers.close()

    def _is_first_router(self) -> bool:
        """Return whether this router has the lowest id of the live ones."""
        first = next(self.host.feed.registry.routers(), None)
        return first is not None and first.router_id == self._config.router_id

    def _note_reconnected(self) -> None:
        self._presence.renew_soon()

    async def _order_worker(self, worker_id: int, lifecycle: Lifecycle) -> None:
        if not self.host.status.has_bus:
            await self.host.registrar.order(worker_id, lifecycle)
            return
        bus = self.host.bus
        if bus is None or not bus.client.is_connected:
            raise BusUnavailableError("worker orders are stored on the bus")
        await self.host.feed.registry.order(bus, worker_id, lifecycle)
