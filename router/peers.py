"""Other indexers: a bounded list, and what blind ranks learn from one of them at the start."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator

import httpx

from router.core import RouterCore
from router.errors import KvRouterError
from router.index_config import IndexerConfig
from router.index_errors import PeerNotFoundError, TooManyPeersError
from router.indexer.base import HeldBlocks
from router.process.bodies import read_body
from router.protocol.dumps import DumpedRank, decode_dump, scope_key
from router.protocol.replies import TrustState
from router.security.http_access import HttpAccess

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""How long the bus has, before peers are asked, to tell by itself what is held."""


class Peers:
    """Peers, in the order they came."""

    def __init__(self, urls: Iterable[str], max_peers: int) -> None:
        self._urls = dict.fromkeys(urls)
        self._max_peers = max_peers

    def __iter__(self) -> Iterator[str]:
        return iter(self._urls)

    def add(self, url: str) -> None:
        """Add a peer; a known one is passed over. Raises TooManyPeersError."""
        if url not in self._urls and len(self._urls) >= self._max_peers:
            raise TooManyPeersError(self._max_peers)
        self._urls[url] = None

    def remove(self, url: str) -> None:
        """Forget a peer. Raises PeerNotFoundError."""
        if url not in self._urls:
            raise PeerNotFoundError(url)
        del self._urls[url]


class Recovery:
    """Asks peers, once, for what blind ranks hold. Their own checkpoints replace it later."""

    def __init__(self, core: RouterCore, config: IndexerConfig) -> None:
        self._core = core
        self._config = config

    async def run(self, registry_caught_up: asyncio.Event) -> None:
        """Ask one peer after the other, until one answers or nobody is blind."""
        if not self._config.peer_urls:
            return
        await registry_caught_up.wait()
        await asyncio.sleep(WAIT_S)
        for url in self._config.peer_urls:
            if not self._anybody_is_blind():
                return
            try:
                dumped = await self._fetch(url)
            except (httpx.HTTPError, httpx.InvalidURL, KvRouterError) as error:
                log.warning("peer %s gave no dump: %s", url, str(error) or type(error).__name__)
                continue
            restored = await self._restore_all(dumped)
            log.info("peer %s has %d ranks; %d of them were blind here", url, len(dumped), restored)
            return

    async def _fetch(self, url: str) -> list[DumpedRank]:
        """Raises httpx.HTTPError, WireError, ConfigError, BodyTooLargeError, BodyTimeoutError."""
        config = self._config
        timeout_s, limit_bytes = config.peer_timeout_s, config.peer_dump_limit_bytes
        files = (config.peer_tls_ca_file, config.peer_tls_cert_file, config.peer_tls_key_file)
        access = HttpAccess(config.peer_token_file, *files)
        async with (
            httpx.AsyncClient(timeout=timeout_s, **access.options("peer")) as client,
            client.stream("GET", f"{url.rstrip('/')}/dump") as response,
        ):
            response.raise_for_status()
            payload = await read_body(response.aiter_bytes(), limit_bytes, timeout_s)
        return await asyncio.to_thread(decode_dump, payload)

    def _anybody_is_blind(self) -> bool:
        now_s = time.monotonic()
        ranks = (rank for worker in self._core.fleet for rank in worker.announcement.ranks)
        return any(self._core.index.trust(rank, now_s).state is TrustState.BLIND for rank in ranks)

    async def _restore_all(self, dumped: Iterable[DumpedRank]) -> int:
        """How many ranks were restored; requests are answered in between."""
        restored = 0
        for each in dumped:
            restored += self._begin(each)
            while self._core.apply_slice():
                await asyncio.sleep(0)
        return restored

    def _begin(self, dumped: DumpedRank) -> bool:
        """False where the rank is not blind, or not what the peer takes it for."""
        worker = self._core.fleet.get(dumped.rank.worker_id)
        if worker is None:
            return False
        known = worker.announcement
        here = (scope_key(known.scope), known.identity.block_size)
        if here != (dumped.scope_key, dumped.block_size):
            return False
        blocks = [HeldBlocks(dumped.rank, tier, held) for tier, held in dumped.blocks.items()]
        return self._core.index.restore(dumped.rank, dumped.event_id, blocks, time.monotonic())
