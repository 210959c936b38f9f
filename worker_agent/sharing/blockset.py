"""Exports of a worker's blocks, and their use by other workers.

    owner   BlocksetExport ──JSON──▶ importer   RemoteBlocksets.import_remote_blockset
            leased         ──JSON──▶            get_remote_blocks_mutable, _immutable ─▶ put, get

An export is of one process of its worker (`epoch`), and valid for `lease_s` after its import. Pure;
time is an argument. Source: the blocksets of Dynamo's block manager. Those exports can be imported
once and never expire.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec
from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.values import UNREADABLE, Rank
from worker_agent.blocks.descriptors import BlockDescriptorList, Mutability
from worker_agent.blocks.handles import Handle, MutableBlocks
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.descriptor import LayoutDescriptor
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.reports import BlocksetReport, SetReport
from worker_agent.transfer.errors import TransferError

T = TypeVar("T", bound=Struct)

READABLE = frozenset({"DRAM", "VRAM"})
MAX_BYTES = 1 << 20
MAX_IMPORTED = 4096
"""Limit of imported blocksets; beyond it, others are refused."""


class BlocksetExport(Struct, frozen=True):
    """A description of the blocks of a worker's rank, as announced in `blocksets`."""

    worker_id: int
    epoch: int
    """Larger in each process of the worker than in earlier ones."""
    lease_s: float
    """The time that importers may rely on it, unless it is renewed."""
    fingerprint: int
    """The fingerprint of its model; blocks of another model cannot be used."""
    block_sets: dict[int, LayoutDescriptor]
    addresses: list[str]
    """The addresses of the block server: `tcp://host:port`."""
    dp_rank: int = 0

    @property
    def rank(self) -> Rank:
        """The rank whose blocks they are."""
        return Rank(self.worker_id, self.dp_rank)


class Imported(StrEnum):
    """The effect of an import."""

    NEW = "new"
    RENEWED = "renewed"
    """The same epoch as before; its lease restarts."""
    REPLACED = "replaced"
    """A later epoch; blocks of the former one are invalid."""


class ImportOutcome(Struct, frozen=True):
    """The effect of an import, and the indexes of the sets that cannot be read remotely."""

    imported: Imported
    skipped: list[int]


class ImportedBlockset(Struct, frozen=True):
    """The export of another rank, and when it expires unless it is renewed."""

    export: BlocksetExport
    until_s: float


class RemoteBlocks(Struct, frozen=True):
    """Blocks of another worker, and the addresses of its block server."""

    listed: BlockDescriptorList
    config: LayoutConfig
    addresses: tuple[str, ...]

    @property
    def is_mutable(self) -> bool:
        """True if they may be written."""
        return self.listed.mutability is Mutability.MUTABLE


class RemoteBlocksets:
    """The imported exports of other ranks: at most `MAX_IMPORTED`, of each its last epoch."""

    __slots__ = ("_config", "_fingerprint", "_known", "rank")

    def __init__(self, rank: Rank, fingerprint: int, config: LayoutConfig) -> None:
        """Set up an empty collection of `rank`; blocks like ours have `config`."""
        self.rank = rank
        self._fingerprint = fingerprint
        self._config = config
        self._known: dict[Rank, ImportedBlockset] = {}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def imported(self) -> list[ImportedBlockset]:
        """The imported exports. Any thread may read it."""
        return list(self._known.values())

    def import_remote_blockset(self, data: bytes, now_s: float) -> ImportOutcome:
        """Import a worker's export. Raises BlocksetError and then changes nothing."""
        export = decode(data, BlocksetExport)
        self._check(export)
        known = self._known.get(export.rank)
        imported = Imported.NEW if known is None else Imported.REPLACED
        if known is not None and export.epoch < known.export.epoch:
            allowed = f"{known.export.epoch}, or a later one"
            raise BlocksetError("epoch", f"{export.epoch}", allowed, rule="older_epoch")
        if known is not None and export.epoch == known.export.epoch:
            imported, export = Imported.RENEWED, known.export
        if known is None and len(self._known) >= MAX_IMPORTED:
            reason, allowed = f"{len(self._known)} are imported", f"at most {MAX_IMPORTED}"
            raise BlocksetError("blocksets", reason, allowed, rule="too_many_blocksets")
        sets = export.block_sets
        skipped = [index for index, each in sets.items() if not is_readable(each)]
        self._known[export.rank] = ImportedBlockset(export, now_s + export.lease_s)
        return ImportOutcome(imported, skipped)

    def renew(self, rank: Rank, now_s: float) -> bool:
        """Restart the lease of an export that is announced as before; False if there is none."""
        known = self._known.get(rank)
        if known is None:
            return False
        self._known[rank] = ImportedBlockset(known.export, now_s + known.export.lease_s)
        return True

    def forget(self, rank: Rank) -> None:
        """Remove a rank's export; repeated calls have no effect."""
        self._known.pop(rank, None)

    def addresses(self, rank: Rank, now_s: float) -> Sequence[str]:
        """Return where a rank serves its blocks; empty if it is not imported, or expired."""
        known = self._known.get(rank)
        return () if known is None or now_s >= known.until_s else known.export.addresses

    def get_remote_blocks_mutable(self, data: bytes, now_s: float) -> RemoteBlocks:
        """Return blocks to write. Raises BlocksetError."""
        listed = decode(data, BlockDescriptorList)
        if listed.mutability is not Mutability.MUTABLE:
            reason = "cannot get mutable remote blocks for immutable block descriptors"
            raise BlocksetError("mutability", reason, "mutable", rule="immutable")
        return self._blocks(listed, now_s)

    def get_remote_blocks_immutable(self, data: bytes, now_s: float) -> RemoteBlocks:
        """Return blocks to read, mutable or not. Raises BlocksetError."""
        return self._blocks(decode(data, BlockDescriptorList), now_s)

    def _blocks(self, listed: BlockDescriptorList, now_s: float) -> RemoteBlocks:
        known = self._known.get(listed.rank)
        where = f"no remote blockset found for worker {listed.rank}"
        if known is None:
            allowed = ", ".join(map(str, self._known)) or "none is imported"
            raise BlocksetError("worker_id", where, allowed, rule="unknown_worker")
        if now_s >= known.until_s:
            raise BlocksetError("lease", "expired", "an import that is fresh", rule="lease_expired")
        export = known.export
        if listed.epoch != export.epoch:
            raise BlocksetError("epoch", f"{listed.epoch}", f"{export.epoch}", rule="other_epoch")
        described = export.block_sets.get(listed.block_set_idx)
        if described is None or not is_readable(described):
            readable = [str(i) for i, each in export.block_sets.items() if is_readable(each)]
            reason = f"{where}, set {listed.block_set_idx}"
            allowed = ", ".join(readable) or "none"
            raise BlocksetError("block_set_idx", reason, allowed, rule="unknown_set")
        _check_indices(listed, described.layout_config.num_blocks)
        return RemoteBlocks(listed, described.layout_config, tuple(export.addresses))

    def _check(self, export: BlocksetExport) -> None:
        if export.rank == self.rank:
            reason = "cannot import blockset from self"
            raise BlocksetError("worker_id", reason, "another worker's", rule="import_from_self")
        if export.fingerprint != self._fingerprint:
            allowed = f"{self._fingerprint:x}, as ours: the same model, weights, kv_page and ranks"
            reason = f"{export.fingerprint:x}, of another model, or of blocks in another order"
            raise BlocksetError("fingerprint", reason, allowed, rule="other_model")
        for index, described in export.block_sets.items():
            named = described.nixl_metadata.agent_name
            if named != f"{export.worker_id}":
                allowed = f"{export.worker_id}"
                raise BlocksetError(f"block_sets[{index}]", named, allowed, rule="other_agent")
            if not is_alike(described.layout_config, self._config):
                reason, allowed = f"{described.layout_config}", f"blocks like ours: {self._config}"
                raise BlocksetError(f"block_sets[{index}]", reason, allowed, rule="other_layout")


def described_blocks(
    handle: Handle, rank: Rank, block_set_idx: int, *, lease: str = "", epoch: int = 0
) -> BlockDescriptorList:
    """Return the description of a handle's blocks.

    Raises BlocksetError if there are none, and for a released handle.
    """
    if not handle.is_live:
        rule = "invalid_block_handle"
        raise BlocksetError("handle", "released", "one that is not", rule=rule)
    if not len(handle):
        raise BlocksetError("handle", "no blocks", "at least one", rule="empty_input")
    is_mutable = isinstance(handle, MutableBlocks)
    mutability = Mutability.MUTABLE if is_mutable else Mutability.IMMUTABLE
    indices = handle.block_ids
    return BlockDescriptorList(
        rank.worker_id, block_set_idx, mutability, indices, lease, epoch, rank.dp_rank
    )


def check_put(sources: BlockDescriptorList, targets: BlockDescriptorList) -> None:
    """Raise TransferError unless sources may be copied to targets, block by block.

    A source may occur twice.
    """
    if not sources.block_indices:
        rule = "no_blocks_provided"
        raise TransferError("sources", "sources cannot be empty", "at least one", rule=rule)
    counts = len(sources.block_indices), len(targets.block_indices)
    if counts[0] != counts[1]:
        reason = f"{counts[0]} sources, {counts[1]} targets"
        raise TransferError("targets", reason, "as many as sources", rule="count_mismatch")
    if targets.mutability is not Mutability.MUTABLE:
        raise TransferError("targets", "immutable", "mutable blocks", rule="immutable_target")
    distinct = set(targets.block_indices)
    if len(distinct) < counts[1]:
        rule = "duplicate_destination_blocks"
        raise TransferError("targets", "one twice", "each block once", rule=rule)
    is_same_set = (sources.rank, sources.block_set_idx) == (targets.rank, targets.block_set_idx)
    if is_same_set and not distinct.isdisjoint(sources.block_indices):
        both = min(distinct.intersection(sources.block_indices))
        reason = f"{both} is a source, too"
        raise TransferError("targets", reason, "blocks that are no source", rule="overlapping")


def is_alike(one: LayoutConfig, other: LayoutConfig) -> bool:
    """Return whether blocks of both layouts have the same content, wherever they are."""
    return _content(one) == _content(other)


def encode(message: Struct) -> bytes:
    """Encode a message as JSON."""
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a message from JSON. Raises BlocksetError."""
    if len(data) > MAX_BYTES:
        allowed = f"at most {MAX_BYTES}"
        raise BlocksetError("bytes", f"{len(data)}", allowed, rule="serialization_error")
    try:
        return msgspec.json.decode(data, type=kind)
    except (*UNREADABLE, KvRouterError) as error:
        allowed = f"JSON of a {kind.__name__}"
        raise BlocksetError("bytes", str(error), allowed, rule="serialization_error") from error


def report_of(export: BlocksetExport) -> BlocksetReport:
    """Return what an agent shows of an export."""
    sets = {
        index: SetReport(
            each.layout_config.num_blocks,
            each.layout_config.block_bytes,
            each.layout_type_details.kind.value,
            is_readable(each),
        )
        for index, each in export.block_sets.items()
    }
    return BlocksetReport(export.worker_id, export.dp_rank, export.epoch, export.addresses, sets)


def _content(config: LayoutConfig) -> tuple[int, ...]:
    sizes = config.num_layers, config.outer_dim, config.page_size, config.inner_dim
    return (*sizes, config.dtype_width_bytes)


def is_readable(described: LayoutDescriptor) -> bool:
    """Return whether other workers can read the blocks: those in memory, not those of a file."""
    return described.nixl_metadata.mem_type in READABLE


def _check_indices(listed: BlockDescriptorList, num_blocks: int) -> None:
    if not listed.block_indices:
        raise BlocksetError("block_indices", "none", "at least one", rule="empty_input")
    odd = next((index for index in listed.block_indices if not 0 <= index < num_blocks), None)
    if odd is not None:
        reason = f"block index out of bounds: {odd}"
        allowed = f"0 to {num_blocks - 1}"
        raise BlocksetError("block_indices", reason, allowed, rule="block_out_of_bounds")
