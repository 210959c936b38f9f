"""Blocks of another worker: what it says of them, and which of them somebody may use.

    owner   BlocksetExport ──JSON──▶ importer   RemoteBlocksets.import_remote_blockset
            leased         ──JSON──▶            get_remote_blocks_mutable, _immutable ─▶ put, get

An export is of one life of its worker (`epoch`), and holds for `lease_s` after it was heard. Pure;
time is an argument. Source: the blocksets of Dynamo's block manager, whose exports can be imported
once and never expire.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec
from msgspec import Struct

from router.block_errors import TransferError
from router.blockset_errors import BlocksetError
from router.errors import KvRouterError
from worker_agent.blocks.handles import Handle, MutableBlocks
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.descriptor import LayoutDescriptor

T = TypeVar("T", bound=Struct)

READABLE = frozenset({"DRAM", "VRAM"})
MAX_BYTES = 1 << 20


class Mutability(StrEnum):
    """What others may do with a block."""

    MUTABLE = "mutable"
    """Write and read it."""
    IMMUTABLE = "immutable"
    """Read it."""


class BlockDescriptor(Struct, frozen=True):
    """One block of a worker."""

    worker_id: int
    block_set_idx: int
    block_idx: int
    mutability: Mutability


class BlockDescriptorList(Struct, frozen=True):
    """Blocks of one set of a worker, all of them mutable or none.

    `lease`, `epoch`: under which their owner lets others use them; empty for one's own.
    """

    worker_id: int
    block_set_idx: int
    mutability: Mutability
    block_indices: tuple[int, ...]
    lease: str = ""
    epoch: int = 0

    def blocks(self) -> list[BlockDescriptor]:
        """Each by itself."""
        head = self.worker_id, self.block_set_idx
        return [BlockDescriptor(*head, index, self.mutability) for index in self.block_indices]


class BlocksetExport(Struct, frozen=True):
    """What a worker says of its blocks."""

    worker_id: int
    epoch: int
    """Larger in each of its lives."""
    lease_s: float
    """So long importers may rely on it, unless they hear it again."""
    fingerprint: int
    """Of its model: blocks of another are of no use."""
    block_sets: dict[int, LayoutDescriptor]
    addresses: list[str]
    """Where to ask for blocks: `tcp://host:port`."""


class Imported(StrEnum):
    """What an import changed."""

    NEW = "new"
    RENEWED = "renewed"
    """The same life as before; its lease begins anew."""
    REPLACED = "replaced"
    """A later life: what was had of the former is worth nothing."""


class ImportOutcome(Struct, frozen=True):
    """What became of an import, and the sets that nobody else can read."""

    imported: Imported
    skipped: list[int]


class _Known(Struct, frozen=True):
    export: BlocksetExport
    until_s: float


class RemoteBlocks(Struct, frozen=True):
    """Blocks of another worker, and where to ask for them."""

    listed: BlockDescriptorList
    config: LayoutConfig
    addresses: tuple[str, ...]

    @property
    def is_mutable(self) -> bool:
        """Whether they may be written."""
        return self.listed.mutability is Mutability.MUTABLE


class RemoteBlocksets:
    """What a worker knows of the others. At most one export a worker, that of its last life."""

    __slots__ = ("_config", "_fingerprint", "_known", "worker_id")

    def __init__(self, worker_id: int, fingerprint: int, config: LayoutConfig) -> None:
        """`config`: of our own blocks, whose bytes others' must be like."""
        self.worker_id = worker_id
        self._fingerprint = fingerprint
        self._config = config
        self._known: dict[int, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def import_remote_blockset(self, data: bytes, now_s: float) -> ImportOutcome:
        """Take in what a worker says. Raises BlocksetError, changing nothing."""
        export = decode(data, BlocksetExport)
        self._check(export)
        known = self._known.get(export.worker_id)
        imported = Imported.NEW if known is None else Imported.REPLACED
        if known is not None and export.epoch < known.export.epoch:
            allowed = f"{known.export.epoch}, or a later one"
            raise BlocksetError("epoch", f"{export.epoch}", allowed, rule="older_epoch")
        if known is not None and export.epoch == known.export.epoch:
            imported, export = Imported.RENEWED, known.export
        sets = export.block_sets
        skipped = [index for index, each in sets.items() if not _is_readable(each)]
        self._known[export.worker_id] = _Known(export, now_s + export.lease_s)
        return ImportOutcome(imported, skipped)

    def forget(self, worker_id: int) -> None:
        """The worker is gone; again is nothing."""
        self._known.pop(worker_id, None)

    def get_remote_blocks_mutable(self, data: bytes, now_s: float) -> RemoteBlocks:
        """Blocks to write. Raises BlocksetError."""
        listed = decode(data, BlockDescriptorList)
        if listed.mutability is not Mutability.MUTABLE:
            reason = "cannot get mutable remote blocks for immutable block descriptors"
            raise BlocksetError("mutability", reason, "mutable", rule="immutable")
        return self._blocks(listed, now_s)

    def get_remote_blocks_immutable(self, data: bytes, now_s: float) -> RemoteBlocks:
        """Blocks to read, whatever else may be done with them. Raises BlocksetError."""
        return self._blocks(decode(data, BlockDescriptorList), now_s)

    def _blocks(self, listed: BlockDescriptorList, now_s: float) -> RemoteBlocks:
        known = self._known.get(listed.worker_id)
        where = f"no remote blockset found for worker {listed.worker_id}"
        if known is None:
            allowed = ", ".join(map(str, self._known)) or "none is imported"
            raise BlocksetError("worker_id", where, allowed, rule="unknown_worker")
        if now_s >= known.until_s:
            raise BlocksetError("lease", "expired", "an import that is fresh", rule="lease_expired")
        export = known.export
        if listed.epoch != export.epoch:
            raise BlocksetError("epoch", f"{listed.epoch}", f"{export.epoch}", rule="other_epoch")
        described = export.block_sets.get(listed.block_set_idx)
        if described is None or not _is_readable(described):
            readable = [str(i) for i, each in export.block_sets.items() if _is_readable(each)]
            reason = f"{where}, set {listed.block_set_idx}"
            allowed = ", ".join(readable) or "none"
            raise BlocksetError("block_set_idx", reason, allowed, rule="unknown_set")
        _check_indices(listed, described.layout_config.num_blocks)
        return RemoteBlocks(listed, described.layout_config, tuple(export.addresses))

    def _check(self, export: BlocksetExport) -> None:
        if export.worker_id == self.worker_id:
            reason = "cannot import blockset from self"
            raise BlocksetError("worker_id", reason, "another worker's", rule="import_from_self")
        if export.fingerprint != self._fingerprint:
            allowed = f"{self._fingerprint:x}, as ours"
            reason = f"{export.fingerprint:x}, of another model"
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
    handle: Handle, worker_id: int, block_set_idx: int, *, lease: str = "", epoch: int = 0
) -> BlockDescriptorList:
    """The blocks of a handle. Raises BlocksetError for none, and for a handle that is released."""
    if not handle.is_live:
        rule = "invalid_block_handle"
        raise BlocksetError("handle", "released", "one that is not", rule=rule)
    if not len(handle):
        raise BlocksetError("handle", "no blocks", "at least one", rule="empty_input")
    is_mutable = isinstance(handle, MutableBlocks)
    mutability = Mutability.MUTABLE if is_mutable else Mutability.IMMUTABLE
    indices = handle.block_ids
    return BlockDescriptorList(worker_id, block_set_idx, mutability, indices, lease, epoch)


def listed_blocks(blocks: Sequence[BlockDescriptor]) -> BlockDescriptorList:
    """Blocks as one list. Raises BlocksetError for none, and where they differ in more than their
    index.
    """
    if not blocks:
        raise BlocksetError("blocks", "none", "at least one", rule="empty_input")
    heads = {(each.worker_id, each.block_set_idx, each.mutability) for each in blocks}
    if len(heads) > 1:
        shown = " and ".join(str(head) for head in sorted(heads))
        allowed = "blocks of one worker, one set and one mutability"
        raise BlocksetError("blocks", shown, allowed, rule="not_homogeneous")
    [head] = heads
    return BlockDescriptorList(*head, tuple(each.block_idx for each in blocks))


def check_put(sources: BlockDescriptorList, targets: BlockDescriptorList) -> None:
    """Whether one may be copied to the other, block by block; a source may be there twice.

    Raises TransferError.
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
    is_same_set = (sources.worker_id, sources.block_set_idx) == (
        targets.worker_id,
        targets.block_set_idx,
    )
    if is_same_set and not distinct.isdisjoint(sources.block_indices):
        both = min(distinct.intersection(sources.block_indices))
        reason = f"{both} is a source, too"
        raise TransferError("targets", reason, "blocks that are no source", rule="overlapping")


def is_alike(one: LayoutConfig, other: LayoutConfig) -> bool:
    """Whether the bytes of their blocks mean the same, wherever they lie."""
    return _content(one) == _content(other)


def encode(message: Struct) -> bytes:
    """As JSON."""
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """From JSON. Raises BlocksetError."""
    if len(data) > MAX_BYTES:
        allowed = f"at most {MAX_BYTES}"
        raise BlocksetError("bytes", f"{len(data)}", allowed, rule="serialization_error")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, KvRouterError) as error:
        allowed = f"JSON of a {kind.__name__}"
        raise BlocksetError("bytes", str(error), allowed, rule="serialization_error") from error


def _content(config: LayoutConfig) -> tuple[int, ...]:
    sizes = config.num_layers, config.outer_dim, config.page_size, config.inner_dim
    return (*sizes, config.dtype_width_bytes)


def _is_readable(described: LayoutDescriptor) -> bool:
    return described.nixl_metadata.mem_type in READABLE


def _check_indices(listed: BlockDescriptorList, num_blocks: int) -> None:
    if not listed.block_indices:
        raise BlocksetError("block_indices", "none", "at least one", rule="empty_input")
    odd = next((index for index in listed.block_indices if not 0 <= index < num_blocks), None)
    if odd is not None:
        reason = f"block index out of bounds: {odd}"
        allowed = f"0 to {num_blocks - 1}"
        raise BlocksetError("block_indices", reason, allowed, rule="block_out_of_bounds")
