"""The sharing of a block manager's blocks with other workers, in both directions.

    export_local_blockset ─▶ import_remote_blockset        (both ways, over any transport)
    lease ─▶ get_remote_blocks_mutable, _immutable ─▶ put, get

Source: this part of Dynamo's `KvBlockManager`, with additions: a later epoch replaces an earlier
one, leases expire, and the owner checks them.
"""

import secrets
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from router.protocol.values import Rank, Tier
from router.runtime.security.http_access import ClientTls
from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.blocks.handles import Handle, ImmutableBlocks, MutableBlocks
from worker_agent.blocks.names import CacheLevel
from worker_agent.manager.config import CacheModel
from worker_agent.manager.manager import KvBlockManager
from worker_agent.manager.tier_blocks import BlockSet
from worker_agent.sharing.blockset import (
    BlocksetExport,
    ImportedBlockset,
    ImportOutcome,
    RemoteBlocks,
    RemoteBlocksets,
    check_put,
    described_blocks,
    encode,
)
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.leases import MAX_LEASED_BLOCKS, LeaseCounters, Leases
from worker_agent.sharing.nixl_memory import NixlCounters, NixlMemory
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.sharing.peer_server import MAX_CONNECTIONS, PeerCounters, PeerServer
from worker_agent.sharing.receiving import PushReceiver
from worker_agent.sharing.shared_sets import SharedSet, no_proof
from worker_agent.tiers.offload_lane import EdgeCounters
from worker_agent.transfer.block_window import BlockWindow
from worker_agent.transfer.plan import BlockResult
from worker_agent.transfer.stored_tier import StoredTier


class SharingConfig(Struct, frozen=True, kw_only=True):
    """Settings of block sharing."""

    token: bytes
    """The token of the deployment; it authenticates workers."""
    epoch: int
    """The epoch of this process, larger than any earlier one."""
    dp_rank: int = 0
    host: str | None = "127.0.0.1"
    """The address of the block server; None: no port."""
    port: int = 0
    """The port of the block server; 0: any."""
    path: Path | None = None
    """The path of a socket for workers on this host that map shared memory; None: no socket."""
    export_lease_s: float = 60.0
    """The time that importers may rely on an export without a renewal."""
    timeout_s: float = 30.0
    """The timeout for all blocks of one put or get."""
    max_connections: int = MAX_CONNECTIONS
    """The limit of concurrent connections of other workers."""
    max_leased_blocks: int = MAX_LEASED_BLOCKS
    """The limit of leased blocks of each set; others are refused."""
    nixl: bool = False
    """Whether memory of other hosts is read, and may be read, through NIXL."""
    push_lease_s: float = 10.0
    """A push of another worker's blocks ends if none arrives for this time; 0: none is taken."""


class BlockSharing:
    """A server of blocks, from construction to `close`, and a client of other workers.

    Puts and gets block, and belong to one thread; all other methods are for any thread.
    """

    __slots__ = ("_clients", "_clock", "_config", "_leases", "_manager", "_model", "_remote",
                 "_server", "_sets", "_tls", "_windows", "nixl", "receiver")  # fmt: skip

    def __init__(
        self,
        manager: KvBlockManager,
        model: CacheModel,
        config: SharingConfig,
        *,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ClientTls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the server; `model` is the model of the blocks.

        Raises PeerError, NixlUnavailableError, and BlocksetError for a manager without registered
        layouts.
        """
        self._manager = manager
        self._model = model
        self._config = config
        self._tls = client_tls
        self._clock = clock
        self._sets = {each.index: each for each in manager.block_sets().values()}
        self._windows = {
            index: BlockWindow(each.memory.physical)
            for index, each in self._sets.items()
            if each.memory.physical is not None
        }
        rank = Rank(manager.worker_id(), config.dp_rank)
        self._leases = Leases(rank, config.epoch, config.max_leased_blocks)
        self._remote = RemoteBlocksets(rank, model.fingerprint, model.layout(1, 1))
        self._clients: dict[tuple[Rank, str], PeerClient] = {}
        shared = {
            index: SharedSet(
                each.blocks.pool, self._windows[index], each.memory.path, _proof_of(manager, each)
            )
            for index, each in self._sets.items()
            if index in self._windows
        }
        self.nixl = NixlMemory(self._windows.values()) if config.nixl else None
        """Our memory registered with NIXL; None without it."""
        self.receiver = self._receiver()
        """The receiver of other workers' pushes; None without host memory."""
        self._server = PeerServer(
            self._leases,
            shared,
            config.token,
            host=config.host,
            port=config.port,
            path=config.path,
            tls=server_tls,
            timeout_s=config.timeout_s,
            max_connections=config.max_connections,
            clock=clock,
            receiver=self.receiver,
            nixl=self.nixl,
        )

    @property
    def rank(self) -> Rank:
        """Our rank."""
        return self._leases.rank

    @property
    def fingerprint(self) -> int:
        """The fingerprint of the model of our blocks."""
        return self._model.fingerprint

    @property
    def pushes(self) -> tuple[int, int]:
        """The number of pushes to us, and of blocks leased for them."""
        return self._leases.pushes()

    @property
    def counters(self) -> PeerCounters:
        """Totals of the blocks served to other workers."""
        return self._server.counters

    @property
    def lease_counters(self) -> LeaseCounters:
        """Totals of our leases."""
        return self._leases.counters

    @property
    def leases(self) -> int:
        """The number of live leases."""
        return len(self._leases)

    @property
    def leased_blocks(self) -> int:
        """The number of leased blocks; a block of several leases counts each time."""
        return self._leases.leased_blocks()

    @property
    def pulled(self) -> EdgeCounters:
        """Totals of the blocks that the manager's stack read from other workers."""
        return self._manager.stack.pulled

    @property
    def nixl_counters(self) -> NixlCounters:
        """Totals of our reads of other workers' memory through NIXL."""
        return NixlCounters() if self.nixl is None else self.nixl.counters

    @property
    def max_connections(self) -> int:
        """The limit of connections; others are refused."""
        return self._config.max_connections

    @property
    def connections(self) -> int:
        """The number of connections of other workers."""
        return self._server.connection_count

    @property
    def strangers(self) -> int:
        """The number of connections that are not proven yet."""
        return self._server.stranger_count

    @property
    def addresses(self) -> list[str]:
        """The addresses of the block server; that for this host is last."""
        return self._server.addresses

    # ── Our exports ──────────────────────────────────────────────────────────────────────────────

    def export_local_blockset(self, addresses: Sequence[str] | None = None) -> bytes:
        """Return our sets, to be imported. Raises BlocksetError without registered layouts.

        `addresses`: where others reach the block server; None: as it listens.
        """
        layouts, sets = self._manager.layouts(), {}
        for index, each in self._sets.items():
            if each.handle is None:
                allowed = "a manager that registers its layouts"
                raise BlocksetError("layouts", "not registered", allowed, rule="not_registered")
            sets[index] = layouts.descriptor(each.handle)
        return encode(
            BlocksetExport(
                self._manager.worker_id(),
                self._config.epoch,
                self._config.export_lease_s,
                self._model.fingerprint,
                sets,
                list(self._server.addresses if addresses is None else addresses),
                self._config.dp_rank,
            )
        )

    def lease(self, handle: MutableBlocks | ImmutableBlocks, lease_s: float) -> BlockDescriptorList:
        """Lease blocks to the recipient of the list for `lease_s`; takes over the handle.

        Raises BlocksetError for blocks of no set of ours, of a file, and beyond the limit.
        """
        index = self._set_of(handle).index
        if index not in self._windows:
            allowed = "blocks in memory"
            raise BlocksetError("handle", f"blocks of set {index}", allowed, rule="not_readable")
        until_s = self._clock() + lease_s
        return self._leases.grant(handle, index, secrets.token_hex(16), until_s)

    def take_back(self, listed: BlockDescriptorList) -> Handle:
        """End a lease, and return its blocks' handle. Raises BlocksetError."""
        return self._leases.take_back(listed.lease)

    def tick(self) -> int:
        """End expired leases; return their number."""
        return self._leases.expire(self._clock())

    # ── Other exports ────────────────────────────────────────────────────────────────────────────

    def import_remote_blockset(self, data: bytes) -> ImportOutcome:
        """Import another worker's export. Raises BlocksetError."""
        return self._remote.import_remote_blockset(data, self._clock())

    def renew(self, rank: Rank) -> bool:
        """Rely for longer on an export that is announced as before; False if there is none."""
        return self._remote.renew(rank, self._clock())

    def forget(self, rank: Rank) -> None:
        """Drop a rank's export; repeated calls have no effect."""
        self._remote.forget(rank)

    @property
    def imported(self) -> list[ImportedBlockset]:
        """The imported exports."""
        return self._remote.imported

    def addresses_of(self, rank: Rank) -> Sequence[str]:
        """Return where a rank serves its blocks; empty if it is not imported, or expired."""
        return self._remote.addresses(rank, self._clock())

    def get_remote_blocks_mutable(self, data: bytes) -> RemoteBlocks:
        """Return blocks to write. Raises BlocksetError."""
        return self._remote.get_remote_blocks_mutable(data, self._clock())

    def get_remote_blocks_immutable(self, data: bytes) -> RemoteBlocks:
        """Return blocks to read. Raises BlocksetError."""
        return self._remote.get_remote_blocks_immutable(data, self._clock())

    # ── Blocks ───────────────────────────────────────────────────────────────────────────────────

    def put(
        self, sources: Handle, targets: RemoteBlocks, client: PeerClient | None = None
    ) -> list[BlockResult]:
        """Write our blocks into another worker's. Raises TransferError, BlocksetError.

        `client`: of another thread, which calls this; see `client`.
        """
        listed = self._described(sources)
        check_put(listed, targets.listed)
        blocks = self._windows[listed.block_set_idx].outgoing(listed.block_indices)
        return (client or self._client(targets)).put(blocks, targets.listed)

    def get(self, sources: RemoteBlocks, targets: MutableBlocks) -> list[BlockResult]:
        """Read another worker's blocks into ours. Raises TransferError, BlocksetError."""
        listed = self._described(targets)
        check_put(sources.listed, listed)
        room = self._windows[listed.block_set_idx].incoming(listed.block_indices)
        return self._client(sources).get(sources.listed, room)

    def copy(self, sources: Handle, targets: MutableBlocks) -> None:
        """Copy our blocks to other blocks of ours. Raises TransferError, BlocksetError."""
        source, target = self._described(sources), self._described(targets)
        check_put(source, target)
        blocks = self._windows[source.block_set_idx].outgoing(source.block_indices)
        room = self._windows[target.block_set_idx].incoming(target.block_indices)
        for place, block in enumerate(blocks):
            room.views[place][:] = block
        room.landed(list(range(len(blocks))))

    def client(self, worker_id: int, addresses: Sequence[str], timeout_s: float) -> PeerClient:
        """Return a separate connection to a worker for another thread, which closes it.

        Raises BlocksetError without an address.
        """
        nearest, token = _nearest(addresses), self._config.token
        return PeerClient(
            nearest, worker_id, token, timeout_s=timeout_s, tls=self._tls, nixl=self.nixl
        )

    def close(self, timeout_s: float) -> None:
        """Stop sharing, and end all leases; repeated calls have no effect."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._server.close(timeout_s)
        self._leases.close()
        if self.nixl is not None:
            self.nixl.close()

    # ── Helpers ──────────────────────────────────────────────────────────────────────────────────

    def _receiver(self) -> PushReceiver | None:
        store = self._manager.stack.store_of(Tier.HOST)
        host = self._manager.block_sets().get(CacheLevel.G2)
        if host is None or host.index not in self._windows or not self._config.push_lease_s:
            return None
        if not isinstance(store, StoredTier):
            return None
        return PushReceiver(
            self._leases,
            host,
            self._manager.stack,
            store,
            self._model.fingerprint,
            lease_s=self._config.push_lease_s,
            timeout_s=self._config.timeout_s,
            clock=self._clock,
        )

    def _set_of(self, handle: Handle) -> BlockSet:
        for each in self._sets.values():
            if each.blocks is handle.tier:
                return each
        raise BlocksetError("handle", "of another manager", "this one's", rule="unknown_set")

    def _described(self, handle: Handle) -> BlockDescriptorList:
        return described_blocks(handle, self._leases.rank, self._set_of(handle).index)

    def _client(self, remote: RemoteBlocks) -> PeerClient:
        """Return the connection to a rank; one per rank, regardless of epochs."""
        key = remote.listed.rank, _nearest(remote.addresses)
        for stale in [known for known in self._clients if known[0] == key[0] and known != key]:
            self._clients.pop(stale).close()
        if key not in self._clients:
            self._clients[key] = self.client(key[0].worker_id, [key[1]], self._config.timeout_s)
        return self._clients[key]


def _proof_of(manager: KvBlockManager, blocks: BlockSet) -> Callable[[int, bytes], int | None]:
    """Return the tier's lookup of a block's checksum; the device's tier has none."""
    store = manager.stack.store_of(blocks.level.tier)
    return store.proof if isinstance(store, StoredTier) else no_proof


def _nearest(addresses: Sequence[str]) -> str:
    """Return a local socket's address, if it exists; else a port. Raises BlocksetError."""
    for address in addresses:
        if address.startswith("unix://") and Path(address.removeprefix("unix://")).is_socket():
            return address
    for address in addresses:
        if address.startswith("tcp://"):
            return address
    allowed = "tcp://host:port, or unix:///path on this host"
    raise BlocksetError("addresses", ", ".join(addresses) or "none", allowed, rule="no_address")
