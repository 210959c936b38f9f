"""The blocks of a tier: laid out in memory, named to transfers and peers, numbered, handed out.

TierLayout ─▶ open_memory ─▶ TierMemory ─▶ registered ─▶ BlockSet, and its pool
"""

from pathlib import Path

import torch
from msgspec import Struct
from msgspec.structs import replace

from router.block_errors import StorageError
from router.errors import InvalidFieldError
from worker_agent.blocks.handles import Tier
from worker_agent.blocks.levels import CacheLevel
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.layout import Layout
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager_config import InFile, OnDevice, OnHost, Ready, Shared, TierLayout
from worker_agent.storage.base import Storage
from worker_agent.storage.disk import DiskStorage
from worker_agent.storage.journal import SlotJournal
from worker_agent.storage.mapped_file import MappedFile
from worker_agent.storage.memory import MemoryStorage, host_memory, pinned_memory, shared_memory
from worker_agent.storage.registered import LayoutHandle
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.physical import PhysicalLayout, physical
from worker_agent.transfer.slots import DiskSlots, MemorySlots, Slots
from worker_agent.transfer.stored_tier import StoredTier

MEMORY_CHECK_EVERY = 8
"""Of so many blocks loaded from memory, where sampling is asked for, one is checked."""

DISK_CALLS = 4
DISK_THREADS = 2
"""So that the next batch is under way while one has just come."""
DISK_TIMEOUT_S = 30.0
"""A disk that does not answer a call for so long is left alone until it does."""

FILE_ALIGNMENT_BYTES = 4096
"""Blocks of a file begin at pages."""


class TierMemory(Struct, frozen=True):
    """What the blocks of a tier lie in, and where.

    `physical`: None for a file. `journal`: what each block holds, where that outlives the process.
    `path`: of memory that others can map.
    """

    layout: Layout
    storages: tuple[Storage, ...]
    physical: PhysicalLayout | None = None
    journal: SlotJournal | None = None
    path: Path | None = None

    def close(self) -> None:
        """Give it back, once everybody registered with it has let go."""
        if self.journal is not None:
            self.journal.close()
        for storage in self.storages:
            storage.close()


class BlockSet(Struct, frozen=True):
    """The blocks of a tier. `index` is its own among those of a worker; `handle`: None where
    layouts are not registered.
    """

    index: int
    level: CacheLevel
    memory: TierMemory
    handle: LayoutHandle | None
    blocks: Tier


def open_memory(agent: str, tier: TierLayout, config: LayoutConfig, fingerprint: int) -> TierMemory:
    """Memory for the blocks of a tier. Raises StorageError, RegionError, InvalidFieldError.

    `fingerprint`: of what the blocks are, for the journal.
    """
    laid_out = physical(agent).configured(config).laid_out(tier.kind)
    match tier.place:
        case OnDevice(device):
            return _in_memory(laid_out.allocated_on_device(_torch_device(device)))
        case OnHost(is_pinned):
            allocated = (pinned_memory if is_pinned else host_memory)(config.required_bytes)
            return _in_memory(laid_out.over_memory([allocated]))
        case Shared(path):
            shared = shared_memory(MappedFile(path, config.required_bytes))
            mapped = replace(_in_memory(laid_out.over_memory([shared])), path=path)
            return _journaled(mapped, path, fingerprint)
        case InFile() as file:
            disk = _disk(file, config)
            if file.is_kept:
                return _journaled(_in_file(disk, config), file.path, fingerprint)
            disk.remove()
            return _in_file(disk, config)
        case Ready(storages):
            memory = [each for each in storages if isinstance(each, MemoryStorage)]
            if len(memory) == len(storages):
                return _in_memory(laid_out.over_memory(memory))
            [given] = storages
            return _in_file(given, config)


def stored_tier(blocks: BlockSet, batch_blocks: int) -> StoredTier:
    """The set as a tier below the device, which closes its memory. `batch_blocks`: are stored or
    loaded at a time, in several calls of the system, so that some are proven while others move.
    """
    config = blocks.memory.layout.config
    slots: Slots
    io = None
    match blocks.memory.storages[0]:
        case MemoryStorage() as memory:
            slots = MemorySlots(memory, config.num_blocks)
        case DiskStorage() as disk:
            slots = DiskSlots(disk, config.block_bytes, max(batch_blocks // DISK_CALLS, 1))
            io = IoThreads("disk", DISK_TIMEOUT_S, DISK_THREADS)
        case other:
            raise TypeError(type(other).__name__)
    check_every = MEMORY_CHECK_EVERY if blocks.level is CacheLevel.G2 else 1
    journal = blocks.memory.journal
    return StoredTier(blocks.blocks.pool, slots, journal, io=io, check_every=check_every)


def _disk(file: InFile, config: LayoutConfig) -> DiskStorage:
    return DiskStorage(
        file.path,
        config.num_blocks,
        config.block_bytes,
        zero_fill=file.zero_fill,
        wants_direct=file.is_direct,
    )


def _in_memory(memory: PhysicalLayout) -> TierMemory:
    return TierMemory(memory.layout, memory.storages, memory)


def _in_file(disk: Storage, config: LayoutConfig) -> TierMemory:
    """Raises RegionError for a file that is too small."""
    paged = replace(config, alignment=FILE_ALIGNMENT_BYTES)
    return TierMemory(Layout(paged, LayoutKind.CONTIGUOUS, [disk.region]), (disk,))


def _journaled(memory: TierMemory, path: Path, fingerprint: int) -> TierMemory:
    try:
        num_blocks = memory.layout.config.num_blocks
        journal = SlotJournal(path.with_name(f"{path.name}.journal"), num_blocks, fingerprint)
    except StorageError:
        memory.close()
        raise
    return replace(memory, journal=journal)


def _torch_device(name: str) -> torch.device:
    allowed = "cpu" + ", cuda, cuda:0, …" * torch.cuda.is_available()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidFieldError("G1.place.device", repr(name), allowed) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidFieldError("G1.place.device", repr(name), allowed)
    return device
