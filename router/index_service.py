"""The index alone, as a process: a hosted core that chooses nothing, and lookups in its index."""

import asyncio
from collections.abc import Iterable
from random import Random

from router.core import RouterCore
from router.core_host import CoreHost, Task
from router.http.front import Front
from router.http.index_api import IndexApi
from router.index_config import IndexerConfig
from router.index_rpc import IndexRpc
from router.indexer.selection import make_indexer
from router.instances import instance
from router.lookups import Lookups
from router.peers import Peers, Recovery
from router.process.settings import Loaded
from router.publisher.bus import Bus


class IndexService:
    """One index. `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: IndexerConfig) -> None:
        index = config.index
        core = RouterCore(config.core, lambda: make_indexer(index), Random())
        lookups = Lookups(core, config.frequency_window_s)
        self._host = CoreHost(
            "indexer",
            config,
            core,
            make_worker=instance,
            needs_workers=False,
            on_drain=lambda: self._rpc.drain(),
        )
        told = (self._host.metrics, self._host.subjects, self._host.edge.guard)
        self._rpc = IndexRpc(core, lookups, *told, config.max_bus_requests)
        self._recovery = Recovery(core, config)
        peers = Peers(config.peer_urls, config.max_peers)
        self._api = IndexApi(config, self._host, lookups, peers)
        self._front = Front(self._api.app(), config, self._host.metrics, self._host.edge.guard)

    def reconfigure(self, loaded: Loaded[IndexerConfig]) -> None:
        """Go on with other settings, those of `reload.LIVE`."""
        for each in (self._host, self._front, self._api):
            each.reconfigure(loaded.config)

    def reread(self) -> list[str]:
        """Read files that settings name again; what came of it, in words."""
        return self._host.edge.reload()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then not ready, drain, close. Raises ConfigError."""
        await self._host.run(stop, self._front, self._live, self._background)

    def _live(self, bus: Bus, _: str) -> Iterable[Task]:
        yield self._rpc.run(bus)

    def _background(self) -> Iterable[Task]:
        yield self._recovery.run(self._host.registry.caught_up)
