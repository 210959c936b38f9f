"""An agent's blocks for other workers, and theirs for it: every rank gives its own, at a place of
its own.

    settings ─▶ BlockSharing a rank ─▶ block_addresses of the announcement
    a request's source ─▶ AddressBook ─▶ PeerSource ─▶ the rank's stack, which asks a PeerTier
"""

import socket
import ssl
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from router.blockset_errors import PeerError
from router.errors import ConfigError
from router.process.serving import ANY_ADDRESS
from router.protocol.replies import BlockSource
from router.protocol.values import Rank
from router.security.tls import client_context
from worker_agent.address_book import AddressBook
from worker_agent.blocks.sources import PeerSource
from worker_agent.config import ReferenceConfig
from worker_agent.manager import KvBlockManager
from worker_agent.manager_config import CacheModel
from worker_agent.sharing import BlockSharing, SharingConfig
from worker_agent.transfer.block_tier import BlockGiver
from worker_agent.transfer.peer_tier import PeerTier

TOKEN_BYTES = 32
CLOSE_TIMEOUT_S = 5.0


class AgentSharing:
    """Gives blocks from construction to `close`."""

    def __init__(
        self,
        config: ReferenceConfig,
        epoch: int,
        managers: Mapping[Rank, KvBlockManager],
        model: CacheModel,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`epoch`: of this life; `tls`: of a server, None without. Raises ConfigError where nobody
        can listen, leaving nothing behind.
        """
        self.book = AddressBook()
        self.ranks: dict[Rank, BlockSharing] = {}
        self._config = config
        files = config.share_ca_file, config.tls_cert_file, config.tls_key_file
        client_tls = None if tls is None else client_context(*files, prefix="share")
        try:
            for index, (rank, manager) in enumerate(managers.items()):
                ours = _sharing_config(config, epoch, index, rank)
                sharing = BlockSharing(manager, model, ours, server_tls=tls, client_tls=client_tls)
                self.ranks[rank] = sharing
                manager.stack.connect_peers(_Connecting(sharing, config.onboard_timeout_s).to)
        except PeerError as error:
            self.close()
            allowed = "ports, and a directory, where this agent may listen"
            raise ConfigError("share", str(error), allowed) from error

    @property
    def addresses(self) -> dict[int, list[str]]:
        """Where other workers have the blocks of each rank, as it is announced."""
        name = self._config.share_address
        return {
            rank.dp_rank: [_named(each, name) for each in sharing.addresses]
            for rank, sharing in self.ranks.items()
        }

    async def source(self, said: BlockSource, rank: Rank) -> PeerSource | None:
        """What a request for one of our ranks said of others' blocks, if it is of use."""
        source = Rank(said.worker_id, said.dp_rank)
        addresses = () if source == rank else await self.book.find(source)
        return PeerSource(source, addresses, said.blocks) if addresses else None

    def close(self) -> None:
        """Give nothing any more."""
        for sharing in self.ranks.values():
            sharing.close(CLOSE_TIMEOUT_S)


class _Connecting:
    """How a rank's stack reaches others. `timeout_s`: beyond, it would not wait any more."""

    def __init__(self, sharing: BlockSharing, timeout_s: float) -> None:
        self._sharing = sharing
        self._timeout_s = timeout_s

    def to(self, rank: Rank, addresses: Sequence[str]) -> BlockGiver:
        """Who gives the blocks of another rank."""
        client = self._sharing.client(rank.worker_id, addresses, self._timeout_s)
        return PeerTier(f"worker {rank}", client)


def _sharing_config(config: ReferenceConfig, epoch: int, index: int, rank: Rank) -> SharingConfig:
    path = Path(config.share_dir) / f"kv-{rank}.blocks" if config.share_dir else None
    return SharingConfig(
        token=_token(config),
        epoch=epoch,
        host=config.host,
        port=config.share_port + index if config.share_port else 0,
        path=path,
        timeout_s=config.share_timeout_s,
        max_connections=config.share_max_connections,
    )


def _token(config: ReferenceConfig) -> bytes:
    """By which workers of a fleet know each other. Raises ConfigError."""
    key = config.read_block_key
    assert key is not None  # `share` needs it
    pair = key.low.to_bytes(8, "little") + key.high.to_bytes(8, "little")
    return blake2b(pair, digest_size=TOKEN_BYTES, person=b"kv sharing").digest()


def _named(address: str, name: str) -> str:
    """An address with the name that others know this host by; the machine's own where it listens
    on every address.
    """
    scheme, _, rest = address.partition("://")
    if scheme != "tcp":
        return address
    host, _, port = rest.rpartition(":")
    host = name or (socket.gethostname() if host.strip("[]") in ANY_ADDRESS else host.strip("[]"))
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
