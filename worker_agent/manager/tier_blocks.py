"""The blocks of a tier: their memory, layout, registration and pool.

TierLayout ─▶ open_memory ─▶ TierMemory ─▶ registered ─▶ BlockSet, and its pool
"""

from pathlib import Path

import torch
from msgspec import Struct
from msgspec.structs import replace

from router.errors import InvalidFieldError
from worker_agent.blocks.handles import Tier
from worker_agent.blocks.names import CacheLevel
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.layout import Layout
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.config import InFile, OnDevice, OnHost, Ready, Shared, TierLayout
from worker_agent.storage.base import Storage
from worker_agent.storage.disk import DiskStorage
from worker_agent.storage.errors import StorageError
from worker_agent.storage.journal import SlotJournal
from worker_agent.storage.mapped_file import MappedFile
from worker_agent.storage.memory import MemoryStorage, host_memory, pinned_memory, shared_memory
from worker_agent.storage.registered import LayoutHandle
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.physical import PhysicalLayout, physical
from worker_agent.transfer.slots import DiskSlots, MemorySlots, Slots
from worker_agent.transfer.stored_tier import StoredTier

MEMORY_CHECK_EVERY = 8
"""With sampling, one of this number of blocks loaded from memory is verified."""

DISK_CALLS = 4
DISK_THREADS = 2
"""Two threads, so that the next batch is in progress when one has just arrived."""
DISK_TIMEOUT_S = 30.0
"""The timeout of a disk call; the disk is not used again until it returns."""

FILE_ALIGNMENT_BYTES = 4096
"""The alignment of blocks in a file: they begin at pages."""


class TierMemory(Struct, frozen=True):
    """The memory or file with the blocks of a tier.

    `physical`: None for a file. `journal`: the content of each block, if it outlives the process.
    `path`: of memory that other processes can map.
    """

    layout: Layout
    storages: tuple[Storage, ...]
    physical: PhysicalLayout | None = None
    journal: SlotJournal | None = None
    path: Path | None = None

    def close(self) -> None:
        """Free the memory, once all its registrations are released."""
        if self.journal is not None:
            self.journal.close()
        for storage in self.storages:
            storage.close()


class BlockSet(Struct, frozen=True):
    """The blocks of a tier.

    `index`: its number among the sets of a worker. `handle`: None if layouts are not registered.
    """

    index: int
    level: CacheLevel
    memory: TierMemory
    handle: LayoutHandle | None
    blocks: Tier


def open_memory(agent: str, tier: TierLayout, config: LayoutConfig, fingerprint: int) -> TierMemory:
    """Return memory for the blocks of a tier.

    `fingerprint`: of the model, for the journal. Raises StorageError, RegionError,
    InvalidFieldError.
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
    """Return the set as a tier below the device, which closes its memory.

    `batch_blocks`: the number of blocks stored or loaded at a time. A batch takes several system
    calls, so that some blocks are verified while others move.
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
    """Return the memory of a file. Raises RegionError for a file that is too small."""
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
