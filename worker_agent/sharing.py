"""A block manager's blocks, shared with other workers, and theirs with it.

    export_local_blockset ─▶ import_remote_blockset        (both ways, over whatever carries bytes)
    lease ─▶ get_remote_blocks_mutable, _immutable ─▶ put, get

Source: this part of Dynamo's `KvBlockManager`, with what it leaves out: a later life replaces an
earlier one, leases end, and the owner checks them.
"""

import secrets
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from router.blockset_errors import BlocksetError
from worker_agent.block_sets import BlockSet
from worker_agent.blocks.handles import Handle, ImmutableBlocks, MutableBlocks
from worker_agent.blockset import (
    BlockDescriptorList,
    BlocksetExport,
    ImportOutcome,
    RemoteBlocks,
    RemoteBlocksets,
    check_put,
    described_blocks,
    encode,
)
from worker_agent.leases import Leases
from worker_agent.manager import KvBlockManager
from worker_agent.manager_config import CacheModel
from worker_agent.tiers.way_down import EdgeCounters
from worker_agent.transfer.outcome import Outcome
from worker_agent.transfer.peer_client import PeerClient
from worker_agent.transfer.peer_giving import SharedSet, no_proof
from worker_agent.transfer.peer_server import MAX_CONNECTIONS, PeerCounters, PeerServer
from worker_agent.transfer.stored_tier import StoredTier
from worker_agent.transfer.window import Window


class SharingConfig(Struct, frozen=True, kw_only=True):
    """How blocks are shared."""

    token: bytes
    """Of the deployment; whoever knows it is a worker."""
    epoch: int
    """Of this life: larger than that of any before."""
    host: str = "127.0.0.1"
    port: int = 0
    """Where others ask for blocks; 0: any."""
    path: Path | None = None
    """Of a socket for workers on this host, who read shared memory by themselves; None: none."""
    export_lease_s: float = 60.0
    """So long others may rely on an export without hearing another."""
    timeout_s: float = 30.0
    """For all blocks of one put or get."""
    max_connections: int = MAX_CONNECTIONS
    """Of others, at once."""


class BlockSharing:
    """Serves from construction to `close`. Puts and gets block, and belong to one thread; all else
    is for any.
    """

    __slots__ = ("_clients", "_clock", "_config", "_leases", "_manager", "_model", "_remote",
                 "_server", "_sets", "_tls", "_windows")  # fmt: skip

    def __init__(
        self,
        manager: KvBlockManager,
        model: CacheModel,
        config: SharingConfig,
        *,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model`: what blocks are blocks of. Raises PeerError, and BlocksetError for a manager
        whose layouts are not registered.
        """
        self._manager = manager
        self._model = model
        self._config = config
        self._tls = client_tls
        self._clock = clock
        self._sets = {each.index: each for each in manager.block_sets().values()}
        self._windows = {
            index: Window(each.memory.physical)
            for index, each in self._sets.items()
            if each.memory.physical is not None
        }
        worker_id = manager.worker_id()
        self._leases = Leases(worker_id, config.epoch)
        self._remote = RemoteBlocksets(worker_id, model.fingerprint, model.layout(1, 1))
        self._clients: dict[tuple[int, str], PeerClient] = {}
        shared = {
            index: SharedSet(
                each.blocks.pool, self._windows[index], each.memory.path, _proof_of(manager, each)
            )
            for index, each in self._sets.items()
            if index in self._windows
        }
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
        )

    @property
    def worker_id(self) -> int:
        """Whose blocks they are."""
        return self._manager.worker_id()

    @property
    def counters(self) -> PeerCounters:
        """What others had of us."""
        return self._server.counters

    @property
    def pulled(self) -> EdgeCounters:
        """What the manager's stack had of others."""
        return self._manager.stack.pulled

    @property
    def max_connections(self) -> int:
        """Others beyond are refused."""
        return self._config.max_connections

    @property
    def connections(self) -> int:
        """Of others, now."""
        return self._server.connection_count

    @property
    def addresses(self) -> list[str]:
        """Where others find our blocks; that for this host last."""
        return self._server.addresses

    # ── What we say ──────────────────────────────────────────────────────────────────────────────

    def export_local_blockset(self) -> bytes:
        """Our sets, for others to import. Raises BlocksetError without registered layouts."""
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
                self._server.addresses,
            )
        )

    def lease(self, handle: MutableBlocks | ImmutableBlocks, lease_s: float) -> BlockDescriptorList:
        """Let whoever is given the list use these blocks for so long; the handle is the lease's.

        Raises BlocksetError for blocks of no set of ours, and of a file.
        """
        index = self._set_of(handle).index
        if index not in self._windows:
            allowed = "blocks in memory"
            raise BlocksetError("handle", f"blocks of set {index}", allowed, rule="not_readable")
        until_s = self._clock() + lease_s
        return self._leases.grant(handle, index, secrets.token_hex(16), until_s)

    def take_back(self, listed: BlockDescriptorList) -> Handle:
        """End a lease, and have its blocks again. Raises BlocksetError."""
        return self._leases.take_back(listed.lease)

    def tick(self) -> int:
        """End leases that are over; how many."""
        return self._leases.expire(self._clock())

    # ── What others say ──────────────────────────────────────────────────────────────────────────

    def import_remote_blockset(self, data: bytes) -> ImportOutcome:
        """Take in another worker's export. Raises BlocksetError."""
        return self._remote.import_remote_blockset(data, self._clock())

    def get_remote_blocks_mutable(self, data: bytes) -> RemoteBlocks:
        """Blocks to write. Raises BlocksetError."""
        return self._remote.get_remote_blocks_mutable(data, self._clock())

    def get_remote_blocks_immutable(self, data: bytes) -> RemoteBlocks:
        """Blocks to read. Raises BlocksetError."""
        return self._remote.get_remote_blocks_immutable(data, self._clock())

    # ── Blocks ───────────────────────────────────────────────────────────────────────────────────

    def put(self, sources: Handle, targets: RemoteBlocks) -> list[Outcome]:
        """Write blocks of ours into another worker's. Raises TransferError, BlocksetError."""
        listed = self._described(sources)
        check_put(listed, targets.listed)
        blocks = self._windows[listed.block_set_idx].outgoing(listed.block_indices)
        return self._client(targets).put(blocks, targets.listed)

    def get(self, sources: RemoteBlocks, targets: MutableBlocks) -> list[Outcome]:
        """Read another worker's blocks into ours. Raises TransferError, BlocksetError."""
        listed = self._described(targets)
        check_put(sources.listed, listed)
        room = self._windows[listed.block_set_idx].incoming(listed.block_indices)
        return self._client(sources).get(sources.listed, room)

    def copy(self, sources: Handle, targets: MutableBlocks) -> None:
        """From blocks of ours to others of ours. Raises TransferError, BlocksetError."""
        source, target = self._described(sources), self._described(targets)
        check_put(source, target)
        blocks = self._windows[source.block_set_idx].outgoing(source.block_indices)
        room = self._windows[target.block_set_idx].incoming(target.block_indices)
        for place, block in enumerate(blocks):
            room.views[place][:] = block
        room.landed(list(range(len(blocks))))

    def client(self, worker_id: int, addresses: Sequence[str], timeout_s: float) -> PeerClient:
        """For another thread a connection of its own to a worker; the caller's to close. Raises
        BlocksetError for no address.
        """
        token, tls = self._config.token, self._tls
        return PeerClient(_nearest(addresses), worker_id, token, timeout_s=timeout_s, tls=tls)

    def close(self, timeout_s: float) -> None:
        """Share nothing any more; again is nothing."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._server.close(timeout_s)

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _set_of(self, handle: Handle) -> BlockSet:
        for each in self._sets.values():
            if each.blocks is handle.tier:
                return each
        raise BlocksetError("handle", "of another manager", "this one's", rule="unknown_set")

    def _described(self, handle: Handle) -> BlockDescriptorList:
        return described_blocks(handle, self._manager.worker_id(), self._set_of(handle).index)

    def _client(self, remote: RemoteBlocks) -> PeerClient:
        """The connection to a worker; one, whatever its lives."""
        key = remote.listed.worker_id, _nearest(remote.addresses)
        for stale in [known for known in self._clients if known[0] == key[0] and known != key]:
            self._clients.pop(stale).close()
        if key not in self._clients:
            self._clients[key] = self.client(key[0], [key[1]], self._config.timeout_s)
        return self._clients[key]


def _proof_of(manager: KvBlockManager, blocks: BlockSet) -> Callable[[int, bytes], int | None]:
    """What the tier that keeps these blocks noted of them; nobody does of the device's."""
    store = manager.stack.store_of(blocks.level.tier)
    return store.proof if isinstance(store, StoredTier) else no_proof


def _nearest(addresses: Sequence[str]) -> str:
    """A path, if it is there; else a port. Raises BlocksetError for neither."""
    for address in addresses:
        if address.startswith("unix://") and Path(address.removeprefix("unix://")).is_socket():
            return address
    for address in addresses:
        if address.startswith("tcp://"):
            return address
    allowed = "tcp://host:port, or unix:///path on this host"
    raise BlocksetError("addresses", ", ".join(addresses) or "none", allowed, rule="no_address")
