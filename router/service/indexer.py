"""The standalone index as a process: a hosted core that places nothing, and its lookups."""

import asyncio
from collections.abc import Iterable
from random import Random

from router.api.http.front import Front
from router.api.http.index_api import IndexApi
from router.api.http.web import ReadyProbe
from router.api.index_instances import instance
from router.api.index_queries import Lookups
from router.api.rpc.index_service import IndexRpc
from router.config.indexer import IndexerConfig
from router.core.core import RouterCore
from router.indexer.factory import make_indexer
from router.ingest.peer_recovery import KnownPeers, Recovery
from router.runtime.bus.connection import Bus
from router.runtime.process.loading import Loaded
from router.runtime.process.reload import Outcome
from router.service.bus_feed import Task
from router.service.host import CoreHost, Hooks


class IndexService:
    """One index. `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: IndexerConfig) -> None:
        index = config.index.settings
        core = RouterCore(config.core, lambda: make_indexer(index), Random())
        lookups = Lookups(core, config.frequency_window_s)
        self._host = CoreHost(
            "indexer",
            config,
            core,
            make_worker=instance,
            needs_workers=False,
            hooks=Hooks(on_drain=lambda: self._rpc.drain()),
        )
        told = (self._host.metrics, self._host.subjects, self._host.edge.guard)
        self._rpc = IndexRpc(core, lookups, *told, config.bus.max_bus_requests)
        self._recovery = Recovery(core, config.peers)
        peers = KnownPeers(config.peers.peer_urls, config.peers.max_peers)
        host = self._host
        self._api = IndexApi(
            config.bodies,
            core,
            host.status,
            host.registrar,
            host.engines,
            host.metrics,
            lookups,
            peers,
        )
        own = (config.http, config.bodies, host.metrics, host.edge.guard)
        self._front = Front(self._api.app(), *own, ReadyProbe(host.status, core).find)

    def reconfigure(self, loaded: Loaded[IndexerConfig]) -> None:
        """Apply changed settings, those of `settings.LIVE`."""
        config = loaded.config
        self._host.reconfigure(config)
        self._front.reconfigure(config.http, config.bodies)
        self._api.reconfigure(config.bodies)

    def reloaded(self, outcome: Outcome) -> list[str]:
        """See `Edge.reloaded`."""
        return self._host.edge.reloaded(outcome)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then become not ready, drain and close. Raises ConfigError."""
        await self._host.run(stop, self._front, self._live, self._background)

    def _live(self, bus: Bus, _: str) -> Iterable[Task]:
        yield self._rpc.run(bus)

    def _background(self) -> Iterable[Task]:
        yield self._recovery.run(self._host.feed.registry.caught_up)
