"""The bytes of a slower tier by slot, in memory or in a file, with identities and checksums."""

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from worker_agent.blocks.names import BlockName
from worker_agent.storage.disk import PAGE_BYTES, DiskStorage, aligned_buffer
from worker_agent.storage.errors import StorageError
from worker_agent.storage.journal import Entry, SlotJournal
from worker_agent.storage.memory import MemoryStorage
from worker_agent.transfer.plan import BlockResult
from worker_agent.transfer.rows import checksum


class SlotChecksums:
    """Identities and checksums of `num_slots` slots.

    `journal`: their persistent copy, None if there is none; it never has more than this object.
    """

    __slots__ = ("_checksums", "_identities", "_journal")

    def __init__(self, num_slots: int, journal: SlotJournal | None) -> None:
        self._checksums = [0] * num_slots
        self._identities = [b""] * num_slots
        self._journal = journal

    def invalidate(self, slots: Iterable[int]) -> None:
        """Remove slots from the journal: their bytes are about to change, or are wrong."""
        if self._journal is not None:
            for slot in slots:
                self._journal.begin(slot)

    def note(self, slot: int, identity: bytes, of_bytes: int) -> None:
        """Record a slot's block and checksum.

        The checksum is written first, because `of` may run on another thread.
        """
        self._checksums[slot] = of_bytes
        self._identities[slot] = identity

    def write_down(self, slot: int, name: BlockName) -> None:
        """Write the recorded checksum to the journal, for a later process."""
        if self._journal is not None:
            self._journal.commit(slot, name, self._checksums[slot])

    def is_of(self, slot: int, identity: bytes) -> bool:
        """Return whether this tier stored that block in the slot.

        Bytes stored there by another component cannot be verified.
        """
        return self._identities[slot] == identity

    def of(self, slot: int, identity: bytes) -> int | None:
        """Return the checksum of a block that this tier stored in the slot, or None.

        Any thread may call it while the block is held under this name.
        """
        return self._checksums[slot] if self._identities[slot] == identity else None

    def proof(self, slot: int, row: Tensor) -> BlockResult:
        """Return DONE if these bytes are those recorded for the slot, else CORRUPT."""
        return BlockResult.DONE if checksum(row) == self._checksums[slot] else BlockResult.CORRUPT

    @property
    def is_kept(self) -> bool:
        """True if there is a journal, which a later process can read."""
        return self._journal is not None

    def written(self) -> list[int]:
        """Return the slots that are in the journal of an earlier process."""
        return [] if self._journal is None else self._journal.written()

    def left_behind(self, slots: Iterable[int]) -> list[Entry]:
        """Return the journal's entries of these slots, and record them for `proof` to verify."""
        entries = [] if self._journal is None else self._journal.entries(slots)
        for entry in entries:
            self.note(entry.slot, entry.name.identity, entry.checksum)
        return entries

    def close(self) -> None:
        """Close the journal; its file stays."""
        if self._journal is not None:
            self._journal.close()


class Slots(Protocol):
    """Storage of blocks by slot number.

    `rows[i]`, (block bytes,) uint8 on the host, is the block in `slots[i]`. Calls return an error
    or None for each block, in order.
    """

    batch_blocks: int
    """Best number of blocks per call."""

    def write(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """Copy rows into slots."""

    def read(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """Copy slots into rows."""

    def close(self) -> None:
        """Release the storage of the blocks."""


class MemorySlots:
    """Slots in one region of host memory. Reads and writes do not fail."""

    __slots__ = ("_blocks", "_storage", "batch_blocks")

    def __init__(self, storage: MemoryStorage, num_slots: int, batch_blocks: int = 64) -> None:
        """Divide `storage` into equal slots. Raises StorageError if that leaves a rest."""
        size_bytes = storage.region.size_bytes
        if size_bytes % num_slots:
            allowed = f"a multiple of {num_slots} slots"
            raise StorageError("storage", f"{size_bytes} bytes", allowed)
        self.batch_blocks = batch_blocks
        self._storage = storage
        self._blocks = list(storage.tensor.view(num_slots, -1))

    def write(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """Copy rows into slots, one copy per block."""
        for slot, row in zip(slots, rows, strict=True):
            self._blocks[slot].copy_(row)
        return [None] * len(slots)

    def read(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """Copy slots into rows, one copy per block."""
        for slot, row in zip(slots, rows, strict=True):
            row.copy_(self._blocks[slot])
        return [None] * len(slots)

    def close(self) -> None:
        """Release the memory."""
        self._blocks.clear()
        self._storage.close()


class DiskSlots:
    """Slots in a file.

    Rows that begin at pages and fill whole ones (`aligned_rows`) are read and written in place, by
    any thread. Others pass through one buffer, a batch at a time.
    """

    __slots__ = ("_block_bytes", "_disk", "_staged", "_staging", "_strides", "batch_blocks")

    def __init__(self, disk: DiskStorage, block_bytes: int, batch_blocks: int) -> None:
        self.batch_blocks = batch_blocks
        self._block_bytes = block_bytes
        self._disk = disk
        self._staging = Lock()
        staging = aligned_rows(batch_blocks, disk.stride_bytes)
        self._strides = [_memory(stride) for stride in staging]
        self._staged = list(staging[:, :block_bytes])

    def write(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """Copy rows into slots. Blocking; at most a batch."""
        if self._is_aligned(rows):
            return _storage_errors(self._disk.write(slots, list(map(_memory, rows))))
        staged = self._staged[: len(slots)]
        with self._staging:
            for stage, row in zip(staged, rows, strict=True):
                stage.copy_(row)
            return _storage_errors(self._disk.write(slots, self._strides[: len(slots)]))

    def read(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """Copy slots into rows. Blocking; at most a batch."""
        if self._is_aligned(rows):
            return _storage_errors(self._disk.read(slots, list(map(_memory, rows))))
        with self._staging:
            errors = _storage_errors(self._disk.read(slots, self._strides[: len(slots)]))
            for stage, row in zip(self._staged[: len(slots)], rows, strict=True):
                row.copy_(stage)
        return errors

    def close(self) -> None:
        """Close the file; it stays."""
        self._disk.close()

    def _is_aligned(self, rows: Sequence[Tensor]) -> bool:
        if self._block_bytes != self._disk.stride_bytes:
            return False
        return not any(row.data_ptr() % PAGE_BYTES for row in rows)


def aligned_rows(num_rows: int, row_bytes: int) -> Tensor:
    """Return (rows, row bytes) uint8 on the host, beginning at a page.

    A disk reads and writes them directly if a row is whole pages.
    """
    memory = aligned_buffer(max(num_rows * row_bytes, 1))
    with torch.inference_mode(mode=False):  # An engine may be in it, a tier's thread is not.
        rows = torch.frombuffer(memory, dtype=torch.uint8)[: num_rows * row_bytes]
        return rows.view(num_rows, -1)


def _memory(row: Tensor) -> memoryview:
    return row.numpy().data


def _storage_errors(errors: Sequence[OSError | None]) -> list[StorageError | None]:
    return [
        None if error is None else StorageError("disk", str(error.strerror), "a disk that works")
        for error in errors
    ]
