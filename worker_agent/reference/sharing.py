"""Block sharing of an agent with other workers, in both directions, per rank.

settings ─▶ BlockSharing per rank ─▶ block_addresses and blocksets of the announcement
announcements ─▶ PeerBlocksets: imports;  a request's source ─▶ its import ─▶ PeerSource
PeerSource ─▶ the rank's stack, which queries a PeerTier
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from router.errors import ConfigError
from router.protocol.replies import BlockSource
from router.protocol.requests import RankTarget
from router.protocol.values import Rank
from router.runtime.http_server.server import ANY_ADDRESS
from router.runtime.security.config import BlockKeyConfig
from router.runtime.security.http_access import ClientTls
from worker_agent.blocks.descriptors import BlockDescriptorList, PeerSource
from worker_agent.blocks.names import BlockName, Naming
from worker_agent.config.reference import ReferenceConfig
from worker_agent.manager.config import CacheModel
from worker_agent.manager.manager import KvBlockManager
from worker_agent.manager.settings import derived_secret
from worker_agent.process.announced import AnnouncedWorkers
from worker_agent.reference.completions import HandOver
from worker_agent.sharing.blockset import encode
from worker_agent.sharing.blockset_imports import sharing_report
from worker_agent.sharing.errors import BlocksetError, PeerError
from worker_agent.sharing.nixl_memory import NIXL_NEEDED, NixlUnavailableError
from worker_agent.sharing.peer_blocksets import PeerBlocksets
from worker_agent.sharing.peer_tier import PeerTier
from worker_agent.sharing.pushing import PromptPush, Pushed, Pushes, Steps
from worker_agent.sharing.reports import SharingReport
from worker_agent.sharing.sharing import BlockSharing, SharingConfig
from worker_agent.storage.mapped_file import kept_path

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
EXPIRE_EVERY_S = 0.5
HandingOver: TypeAlias = Callable[[], Awaitable[HandOver]]
"""A hand-over in progress; its result is due once the prompt is computed."""

MAX_EXPORT_BYTES = 512 * 1024
"""Limit of an agent's announced blocksets."""


class AgentSharing:
    """The block sharing of all ranks; it serves blocks from construction to `close`."""

    def __init__(
        self,
        config: ReferenceConfig,
        epoch: int,
        managers: Mapping[Rank, KvBlockManager],
        model: CacheModel,
        tls: ssl.SSLContext | None,
        naming: Naming,
    ) -> None:
        """Start the servers. Raises ConfigError if one cannot listen, after closing the others.

        `epoch`: of this process. `tls`: the server's context; None without TLS. `naming`: of the
        engine's blocks.
        """
        self.naming = naming
        self._managers = managers
        self._lease_s = config.sharing.share_lease_s
        self._timeout_s = config.tiers.onboard_timeout_s
        self.ranks: dict[Rank, BlockSharing] = {}
        self.pushes: dict[Rank, Pushes] = {}
        announced = AnnouncedWorkers(config.engine.model_name, config.identity)
        self.peers = PeerBlocksets(announced, self.ranks)
        self._name = config.sharing.share_address
        security, settings = config.security, config.sharing
        files = settings.share_ca_file, security.tls_cert_file, security.tls_key_file
        client_tls = None if tls is None else ClientTls(*files, prefix="share")
        try:
            for index, (rank, manager) in enumerate(managers.items()):
                ours = _sharing_config(config, epoch, index, rank)
                sharing = BlockSharing(manager, model, ours, server_tls=tls, client_tls=client_tls)
                self.ranks[rank] = sharing
                manager.stack.connect_peers(_Connecting(sharing, self._timeout_s).to)
                if (device := manager.device()) is not None:
                    self.pushes[rank] = Pushes(sharing, device, self._timeout_s)
        except PeerError as error:
            self.close()
            allowed = "ports, and a directory, where this agent may listen"
            raise ConfigError("share", str(error), allowed) from error
        except NixlUnavailableError as error:
            self.close()
            raise ConfigError("share_nixl", str(error), NIXL_NEEDED) from error

    @property
    def addresses(self) -> dict[int, list[str]]:
        """The addresses of each rank's blocks for other workers, as announced."""
        return {
            rank.dp_rank: [_named(each, self._name) for each in sharing.addresses]
            for rank, sharing in self.ranks.items()
        }

    @property
    def blocksets(self) -> dict[int, dict[str, Any]]:
        """The exported pools of each rank, as announced. Raises ConfigError if they are too large.

        Any number of ranks has to fit into one message of the bus.
        """
        exports = self._exports()
        size_bytes = sum(map(len, exports.values()))
        if size_bytes > MAX_EXPORT_BYTES:
            reason = f"the blocksets of {len(exports)} ranks have {size_bytes} bytes"
            raise ConfigError("share", reason, f"{MAX_EXPORT_BYTES}: fewer ranks in an agent")
        return {dp_rank: msgspec.json.decode(each) for dp_rank, each in exports.items()}

    def report(self) -> SharingReport:
        """Return the blocksets. O(imports)."""
        return sharing_report(self.ranks, self._exports().values(), self.peers.imports)

    async def source(
        self, hint: BlockSource, rank: Rank, listed: BlockDescriptorList | None = None
    ) -> PeerSource | None:
        """Return the source of a request's blocks; None if it is this rank or unreachable.

        `listed`: its blocks under a lease; without a usable one they are read by name.
        """
        source = Rank(hint.worker_id, hint.dp_rank)
        addresses = () if source == rank else await self.peers.find(source, rank)
        if not addresses:
            return None
        leased = None
        if listed is not None and listed.rank == source:
            try:
                leased = self.ranks[rank].get_remote_blocks_immutable(encode(listed)).listed
            except BlocksetError as error:
                log.info("lease of worker %s not used: %s", source, error)
        return PeerSource(source, addresses, hint.blocks, leased)

    @asynccontextmanager
    async def handing_over(
        self, names: Sequence[BlockName], rank: Rank, steps: Steps, to: RankTarget | None
    ) -> AsyncIterator[HandingOver]:
        """Hand over the blocks of a prompt that a rank computes in this context.

        `to`: the rank that will decode; they are pushed there if it can be reached.
        """
        target = None if to is None else Rank(to.worker_id, to.dp_rank or 0)
        addresses: Sequence[str] = ()
        if names and target is not None and target != rank and rank in self.pushes:
            addresses = await self.peers.find(target, rank)
        if target is None or not addresses:
            yield partial(self._handed_over, names, rank, None)
            return
        async with self.pushes[rank].push(target, addresses, names, steps) as push:
            yield partial(self._handed_over, names, rank, push)

    async def _handed_over(
        self, names: Sequence[BlockName], rank: Rank, push: PromptPush | None
    ) -> HandOver:
        """Return what the worker that decodes needs of a computed prompt.

        Its blocks on the device are leased to it, unless all of them were pushed.
        """
        pushed = Pushed() if push is None else await push.finished(self._timeout_s)
        source = BlockSource(rank.worker_id, rank.dp_rank, len(names), "device")
        leased = None
        if not pushed.is_whole:
            leased = await asyncio.to_thread(self._leased, rank, names)
        return HandOver(source, pushed.blocks, leased)

    def _leased(self, rank: Rank, names: Sequence[BlockName]) -> BlockDescriptorList | None:
        """Lease the leading blocks of a prompt on a rank's device; None if it is not possible."""
        device = self._managers[rank].device()
        if device is None or not self._lease_s:
            return None
        blocks = device.match([name.identity for name in names])
        try:
            return self.ranks[rank].lease(blocks, self._lease_s)
        except BlocksetError as error:
            log.info("blocks of worker %s not leased: %s", rank, error)
            blocks.release()
            return None

    async def expire(self) -> None:
        """End leases that expired, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            for sharing in self.ranks.values():
                sharing.tick()

    def _exports(self) -> dict[int, bytes]:
        addresses = self.addresses
        return {
            rank.dp_rank: sharing.export_local_blockset(addresses[rank.dp_rank])
            for rank, sharing in self.ranks.items()
        }

    def close(self) -> None:
        """Stop serving blocks."""
        for pushes in self.pushes.values():
            pushes.close()
        for sharing in self.ranks.values():
            sharing.close(CLOSE_TIMEOUT_S)


class _Connecting:
    """The connections of a rank's stack to peers; `timeout_s` is that of its loads."""

    def __init__(self, sharing: BlockSharing, timeout_s: float) -> None:
        self._sharing = sharing
        self._timeout_s = timeout_s

    def to(self, rank: Rank, addresses: Sequence[str]) -> PeerTier:
        """Return a client for the blocks of another rank."""
        client = self._sharing.client(rank.worker_id, addresses, self._timeout_s)
        return PeerTier(f"worker {rank}", client)


def _sharing_config(config: ReferenceConfig, epoch: int, index: int, rank: Rank) -> SharingConfig:
    settings = config.sharing
    folder = settings.share_dir
    path = kept_path(Path(folder), f"kv-{rank}", ".blocks") if folder else None
    return SharingConfig(
        token=_token(config.block_keys),
        epoch=epoch,
        dp_rank=rank.dp_rank,
        host=config.security.host,
        port=settings.share_port + index if settings.share_port else 0,
        path=path,
        timeout_s=settings.share_timeout_s,
        max_connections=settings.share_max_connections,
        max_leased_blocks=config.engine.num_blocks // 2,
        nixl=settings.share_nixl,
        push_lease_s=settings.share_lease_s,
    )


def _token(config: BlockKeyConfig) -> bytes:
    """Return the token that authenticates the workers of a fleet. Raises ConfigError."""
    key = config.read()
    assert key is not None  # `share` requires the key.
    return derived_secret(key, b"kv sharing")


def _named(address: str, name: str) -> str:
    """Return an address with a host name that other workers can resolve.

    The configured name comes first. A server on all addresses has the machine's name.
    """
    scheme, _, rest = address.partition("://")
    if scheme != "tcp":
        return address
    host, _, port = rest.rpartition(":")
    host = name or (socket.gethostname() if host.strip("[]") in ANY_ADDRESS else host.strip("[]"))
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
