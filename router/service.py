"""The router process: who is made of whom, who runs when, and how it stops.

    run ─┬─ HTTP server                                     up from the first moment
         ├─ ticks                                           silence, expiry, overdue checkpoints
         └─ bus: connect ▶ announce, registry, events, loads, commands, outbox   again when closed

One TaskGroup owns every task: what crashes takes the process down, visibly.
"""

import asyncio
import logging
import time
from random import Random

from router.api import Api
from router.commands import Commands
from router.config import RouterConfig
from router.core import RouterCore
from router.errors import BusUnavailableError, TwinError
from router.indexer.radix_tree import RadixTree
from router.metrics import RouterMetrics, StateCollector
from router.outbox import Outbox
from router.process.serving import HttpServer, endpoint_of, listening
from router.protocol.catalogue import (
    Lifecycle,
    RouterAnnouncement,
    encode_entry,
    router_key,
)
from router.protocol.subjects import Subjects
from router.publisher.announcer import Announcer
from router.publisher.bus import Bus, StreamLimits, live_on_bus, until_closed
from router.registry import Registry
from router.rpc import Rpc
from router.status import ServiceStatus
from router.subscriber import Subscriber

log = logging.getLogger(__name__)

TICK_S = 0.2


class RouterService:
    """One router. `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._subjects = Subjects(config.namespace)
        self._incarnation = time.time_ns() // 1000
        self._core = RouterCore(config.core, RadixTree, Random())
        self._status = ServiceStatus(config.nats_url)
        self._metrics = RouterMetrics()
        StateCollector(self._core, self._status, self._metrics)
        self._outbox = Outbox(self._subjects, self._metrics)
        self._commands = Commands(self._core, self._outbox, self._metrics)
        self._bus: Bus | None = None
        self._announcer: Announcer | None = None
        limits = StreamLimits(config.event_stream_max_bytes, config.num_replicas)
        shared = (self._core, self._outbox, self._status, self._metrics, self._subjects)
        self._registry = Registry(*shared, config.num_replicas)
        self._subscriber = Subscriber(*shared, limits)
        self._rpc = Rpc(self._commands, self._metrics, self._subjects)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then not ready, drain, close. Raises ConfigError."""
        with listening(self._config.host, self._config.http_port) as listener:
            endpoint = endpoint_of(listener)
            server = self._http_server()
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve([listener]))
                background = [
                    group.create_task(self._tick_forever()),
                    group.create_task(self._follow_bus(endpoint)),
                ]
                log.info("router %d listens on %s", self._config.router_id, endpoint)
                await stop.wait()
                await self._drain(server)
                await serving
                for task in background:
                    task.cancel()
        log.info("router stopped")

    async def _drain(self, server: HttpServer) -> None:
        log.info("draining for %g s", self._config.drain_s)
        self._status.is_draining = True
        await asyncio.sleep(self._config.drain_s)
        server.should_exit = True

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._outbox.perform(self._core.tick(time.monotonic()))

    async def _follow_bus(self, endpoint: str) -> None:
        await live_on_bus(
            self._config.nats_url,
            f"router {self._config.name}",
            self._connected,
            lambda bus: self._live(bus, endpoint),
        )

    async def _live(self, bus: Bus, endpoint: str) -> None:
        self._bus = bus
        async with asyncio.TaskGroup() as group:
            group.create_task(until_closed(bus))
            group.create_task(self._announce(bus, endpoint))
            group.create_task(self._registry.run(bus))
            group.create_task(self._events_after_registry(bus))
            group.create_task(self._subscriber.run_loads(bus))
            group.create_task(self._rpc.run(bus))
            group.create_task(
                self._outbox.run(bus, lambda worker_id: self._registry.fetch_worker(bus, worker_id))
            )

    async def _events_after_registry(self, bus: Bus) -> None:
        """Events of ranks nobody announced would be dropped."""
        await self._registry.caught_up.wait()
        await self._subscriber.run_events(bus)

    async def _announce(self, bus: Bus, endpoint: str) -> None:
        announcement = RouterAnnouncement(
            router_id=self._config.router_id,
            name=self._config.name,
            endpoint=endpoint,
            incarnation=self._incarnation,
        )
        announcer = Announcer(
            bus.js,
            self._subjects,
            router_key(announcement.router_id),
            self._incarnation,
            num_replicas=self._config.num_replicas,
        )
        self._announcer = announcer
        try:
            await announcer.look()
            await announcer.claim(encode_entry(announcement))
            await announcer.run()
        except TwinError as error:
            log.error("%s; serving on, unannounced: give this router another --name", error)
        finally:
            await announcer.withdraw()

    def _connected(self, connected: bool) -> None:
        self._core.set_connected(connected, time.monotonic())
        if not connected:
            self._metrics.bus_losses.inc()
        elif self._announcer is not None:
            self._announcer.renew_soon()

    async def _order_worker(self, worker_id: int, lifecycle: Lifecycle) -> None:
        if self._bus is None or not self._bus.client.is_connected:
            raise BusUnavailableError("orders about workers are kept there")
        await self._registry.order(self._bus, worker_id, lifecycle)

    def _http_server(self) -> HttpServer:
        api = Api(
            self._config,
            self._commands,
            self._status,
            self._metrics,
            self._order_worker,
            lambda: list(self._registry.routers()),
        )
        return HttpServer(api.app(), self._config.max_connections)
