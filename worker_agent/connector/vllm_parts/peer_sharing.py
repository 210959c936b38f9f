"""The sharing of a worker's host blocks with other engines, and the search for theirs.

agent   BlocksetsQuery ─▶ our export, to be announced
        NamePeers ─▶ BlocksetImports: blocks like ours?  ─▶ PeerFinder asks them, or not
        KeepPeers ─▶ the same are imported for longer, unless others were named last

ours    WorkerSide ─▶ PeerFinder: at which peer?  ─▶ TierStack.load(source) ─▶ PeerTier ─▶ rows
theirs  PeerServer ◀─ Find, GetNamed: blocks of the host tier, by name
"""

import ssl
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from router.errors import ConfigError, InvalidFieldError
from router.protocol.values import Rank
from router.runtime.kernels.hash_key import BlockKey
from router.runtime.security.edge import WatchedFiles
from router.runtime.security.http_access import ClientTls
from router.runtime.security.tls import ServerTls
from worker_agent.config.sharing import rank_address
from worker_agent.connector.vllm_parts.engine import EngineGeometry
from worker_agent.connector.vllm_parts.settings import MAX_PEERS, ConnectorSettings
from worker_agent.manager.config import CacheModel
from worker_agent.manager.manager import KvBlockManager
from worker_agent.manager.settings import derived_secret
from worker_agent.operations.messages import (
    BlocksetsQuery,
    KeepPeers,
    NamePeers,
    PeerCommand,
    PeersNamed,
)
from worker_agent.sharing.blockset_imports import BlocksetImports, sharing_report
from worker_agent.sharing.errors import PeerError
from worker_agent.sharing.nixl_memory import NIXL_NEEDED, NixlCounters, NixlUnavailableError
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.sharing.peer_finder import FIND_S, PeerFinder
from worker_agent.sharing.peer_server import PeerCounters
from worker_agent.sharing.peer_tier import PeerTier
from worker_agent.sharing.reports import RankBlocksets
from worker_agent.sharing.sharing import (
    BlockSharing,
    SharingConfig,
)
from worker_agent.tiers.offload_lane import EdgeCounters

CLOSE_TIMEOUT_S = 5.0


class PeerCounts(Struct, frozen=True):
    """Counters of blocks loaded from peers and given to them, and of unanswered questions."""

    pulled: EdgeCounters
    given: PeerCounters
    nixl: NixlCounters
    unanswered: int


NO_PEERS = PeerCounts(EdgeCounters(), PeerCounters(), NixlCounters(), 0)
"""The counts of a worker that shares nothing."""


class PeerSharing:
    """A worker's block server, if it listens, and its search at peers.

    The token of both is of the fleet's key and of the blocks' format, rank included: workers whose
    blocks differ in anything but the tokens cannot connect.
    """

    __slots__ = (
        "_given", "_gives", "_imports", "_load_timeout_s", "_lock", "_named", "_rank", "_tls",
        "_token", "finder", "sharing",
    )  # fmt: skip

    def __init__(
        self,
        settings: ConnectorSettings,
        facts: EngineGeometry,
        manager: KvBlockManager,
        model: CacheModel,
    ) -> None:
        """Start to listen, and to load from peers. Raises ConfigError."""
        key = settings.block_keys.read()
        assert key is not None, "the settings are checked"
        self._token = peer_token(key, model)
        self._load_timeout_s = settings.tiers.onboard_timeout_s
        addresses = [rank_address("share_peers", each, facts.rank) for each in settings.peers]
        listen = settings.share_listen
        if listen:
            listen = rank_address("share_listen", listen, facts.number)
        server_tls = _server_tls(settings)
        self._tls = ClientTls(settings.share_ca_file, prefix="share") if settings.has_tls else None
        config = _sharing_config(listen, self._token, facts.dp_rank, has_nixl=settings.share_nixl)
        try:
            self.sharing = BlockSharing(manager, model, config, server_tls=server_tls)
        except PeerError as error:
            raise ConfigError("share_listen", str(error), "an address to listen at") from error
        except NixlUnavailableError as error:
            raise ConfigError("share_nixl", str(error), NIXL_NEEDED) from error
        self._rank = facts.rank
        self._given = addresses
        self._gives = bool(listen)
        self._imports = BlocksetImports({self.sharing.rank: self.sharing})
        self._named = PeersNamed()
        self._lock = Lock()
        """Of the imports; commands come from any thread."""
        self.finder = PeerFinder(addresses, self._asking)
        if settings.finds_peers:
            manager.stack.connect_peers(self._loading)

    @property
    def counts(self) -> PeerCounts:
        """The counters since the start."""
        ours = self.sharing
        return PeerCounts(ours.pulled, ours.counters, ours.nixl_counters, self.finder.unanswered)

    def answer(self, command: PeerCommand) -> PeersNamed | RankBlocksets:
        """Execute a command about other engines, on any thread. Raises InvalidFieldError."""
        with self._lock:
            match command:
                case NamePeers():
                    self._named = self._name(command)
                    return self._named
                case KeepPeers():
                    if command.revision == self._named.revision:
                        self._imports.renew()
                    return self._named
                case BlocksetsQuery():
                    return self._blocksets(command.addresses)

    def close(self) -> None:
        """Stop sharing; calling it again has no effect."""
        self.finder.close()
        self.sharing.close(CLOSE_TIMEOUT_S)

    def _name(self, command: NamePeers) -> PeersNamed:
        """Look for blocks at these engines beside those given, and not at those left out.

        One that announces a useful blockset is asked, whatever else is announced for its address,
        as by an agent that was killed.
        """
        announced = {Rank(each.worker_id, each.dp_rank): each for each in command.blocksets}
        self._imports.keep(announced.keys())
        refused, useful = dict.fromkeys(command.left_out), set()
        for rank, each in announced.items():
            if self._imports.take(rank, each.blockset) is None:
                useful.add(each.address)
            else:
                refused[each.address] = None
        left_out = [each for each in refused if each not in useful]
        found = map(self._ours_of, command.addresses)
        no_peers = set(map(self._ours_of, left_out))
        peers = [each for each in (*self._given, *found) if each not in no_peers]
        self.finder.use(peers[:MAX_PEERS])
        return PeersNamed(left_out, command.revision)

    def _ours_of(self, address: str) -> str:
        """Return where an engine's worker of our rank listens, of the address of its first."""
        try:
            return rank_address("addresses", address, self._rank)
        except ConfigError as error:
            raise InvalidFieldError("addresses", error.reason, error.allowed) from error

    def _blocksets(self, addresses: Sequence[str]) -> RankBlocksets:
        ranks = {self.sharing.rank: self.sharing}
        if not self._gives:
            return RankBlocksets(None, sharing_report(ranks, (), self._imports))
        export = self.sharing.export_local_blockset(addresses or None)
        report = sharing_report(ranks, [export], self._imports)
        return RankBlocksets(msgspec.json.decode(export), report)

    def _asking(self, address: str) -> PeerClient:
        return PeerClient(address, None, self._token, timeout_s=FIND_S, tls=self._tls)

    def _loading(self, rank: Rank, addresses: Sequence[str]) -> PeerTier:
        [address] = addresses
        timeout_s, nixl = self._load_timeout_s, self.sharing.nixl
        client = PeerClient(
            address, rank.worker_id, self._token, timeout_s=timeout_s, tls=self._tls, nixl=nixl
        )
        return PeerTier(f"worker {rank} at {address}", client)


def peer_token(key: BlockKey, model: CacheModel) -> bytes:
    """Return the token that workers with the fleet's key and blocks like these prove."""
    fingerprint = model.fingerprint.to_bytes(8, "little")
    secret = derived_secret(key, b"kv sharing")
    return blake2b(fingerprint, key=secret, digest_size=32).digest()


def _server_tls(settings: ConnectorSettings) -> ssl.SSLContext | None:
    """Return the context of the server, of which handshakes read changed files again.

    Raises ConfigError.
    """
    if not settings.tls_cert_file:
        return None
    tls = ServerTls(settings.tls_cert_file, settings.tls_key_file, "")
    tls.before_handshake = WatchedFiles("certificates", tls.files, tls.reload).look
    return tls.context


def _sharing_config(listen: str, token: bytes, dp_rank: int, *, has_nixl: bool) -> SharingConfig:
    """Return the settings of a server that gives blocks and takes none.

    Blocks that an engine restores are those it has computed, or has asked a peer for by name.
    """
    at = urlsplit(listen)
    is_tcp = at.scheme == "tcp"
    return SharingConfig(
        token=token,
        epoch=time.time_ns(),
        dp_rank=dp_rank,
        host=at.hostname if is_tcp else None,
        port=at.port or 0,
        path=Path(at.path) if at.scheme == "unix" else None,
        nixl=has_nixl,
        push_lease_s=0.0,
    )
