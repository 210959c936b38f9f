"""Other indexers: a bounded list, and the recovery of blind ranks from one of them at start-up."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator

import httpx

from router.config.indexer import PeerConfig
from router.core.commands import ApplySlice
from router.core.core import RouterCore
from router.errors import KvRouterError
from router.indexer.base import ExportedBlocks
from router.ingest.errors import PeerNotFoundError, TooManyPeersError
from router.protocol.dumps import DumpedRank, decode_dump, scope_key
from router.protocol.replies import TrustState
from router.runtime.process.json_bodies import read_body

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""Time in which blocks may arrive over the bus before peers are queried, in seconds."""


class KnownPeers:
    """The peers' URLs, in the order of insertion."""

    def __init__(self, urls: Iterable[str], max_peers: int) -> None:
        self._urls = dict.fromkeys(urls)
        self._max_peers = max_peers

    def __iter__(self) -> Iterator[str]:
        return iter(self._urls)

    def add(self, url: str) -> None:
        """Add a peer; a known one is ignored. Raises TooManyPeersError."""
        if url not in self._urls and len(self._urls) >= self._max_peers:
            raise TooManyPeersError(self._max_peers)
        self._urls[url] = None

    def remove(self, url: str) -> None:
        """Remove a peer. Raises PeerNotFoundError."""
        if url not in self._urls:
            raise PeerNotFoundError(url)
        del self._urls[url]


class Recovery:
    """A recovery of blind ranks from a peer's dump, until their own checkpoints replace it."""

    def __init__(self, core: RouterCore, config: PeerConfig) -> None:
        self._core = core
        self._config = config

    async def run(self, registry_caught_up: asyncio.Event) -> None:
        """Query one peer after the other, until one responds or no rank is blind."""
        if not self._config.peer_urls:
            return
        await registry_caught_up.wait()
        await asyncio.sleep(WAIT_S)
        for url in self._config.peer_urls:
            if not self._has_blind_rank():
                log.info("no rank is blind: peer %s is not queried", url)
                return
            try:
                dumped = await self._fetch(url)
            except (httpx.HTTPError, httpx.InvalidURL, KvRouterError) as error:
                log.warning("no dump from peer %s: %s", url, str(error) or type(error).__name__)
                continue
            restored = await self._restore_all(dumped)
            log.info("peer %s has %d ranks; %d of them were blind here", url, len(dumped), restored)
            return

    async def _fetch(self, url: str) -> list[DumpedRank]:
        """Fetch the dump of a peer.

        Raises httpx.HTTPError, WireError, ConfigError, BodyTooLargeError, BodyTimeoutError.
        """
        config = self._config
        timeout_s, limit_bytes = config.peer_timeout_s, config.peer_dump_limit_bytes
        async with (
            httpx.AsyncClient(timeout=timeout_s, **config.access.options("peer", url)) as client,
            client.stream("GET", f"{url.rstrip('/')}/dump") as response,
        ):
            response.raise_for_status()
            payload = await read_body(response.aiter_bytes(), limit_bytes, timeout_s)
        return await asyncio.to_thread(decode_dump, payload)

    def _has_blind_rank(self) -> bool:
        now_s = time.monotonic()
        ranks = (rank for worker in self._core.fleet for rank in worker.announcement.ranks)
        return any(self._core.index.trust(rank, now_s).state is TrustState.BLIND for rank in ranks)

    async def _restore_all(self, dumped: Iterable[DumpedRank]) -> int:
        """Restore ranks, yielding to other tasks between slices. Returns the number restored."""
        restored = 0
        for each in dumped:
            restored += self._begin(each)
            while self._core.handle(ApplySlice(), 0.0)[0]:
                await asyncio.sleep(0)
        return restored

    def _begin(self, dumped: DumpedRank) -> bool:
        """Begin to restore a rank.

        Returns False if the rank is not blind, or differs in its scope or block size.
        """
        worker = self._core.fleet.get(dumped.rank.worker_id)
        if worker is None:
            return False
        known = worker.announcement
        here = (scope_key(known.scope), known.identity.block_size)
        if here != (dumped.scope_key, dumped.block_size):
            return False
        blocks = [ExportedBlocks(dumped.rank, tier, held) for tier, held in dumped.blocks.items()]
        return self._core.index.restore(dumped.rank, dumped.event_id, blocks, time.monotonic())
