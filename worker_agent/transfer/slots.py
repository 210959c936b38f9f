"""The bytes of a slower tier, slot by slot: in host memory, or in a file."""

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from router.block_errors import StorageError
from worker_agent.storage.disk import PAGE_BYTES, DiskStorage, aligned_buffer
from worker_agent.storage.memory import MemoryStorage


class Slots(Protocol):
    """Room for blocks. `rows[i]`, (block bytes,) uint8 on the host, is the block in `slots[i]`.
    What went wrong with each block is the answer, in order.
    """

    batch_blocks: int
    """As many are best moved at a time."""

    def write(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """Rows into slots."""

    def read(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """Slots into rows."""

    def close(self) -> None:
        """Let go of what the blocks lie in."""


class MemorySlots:
    """Slots side by side in one memory, which is the host's. Memory does not fail."""

    __slots__ = ("_blocks", "_storage", "batch_blocks")

    def __init__(self, storage: MemoryStorage, num_slots: int, batch_blocks: int = 64) -> None:
        """Raises StorageError for memory that is not so many equal slots."""
        size_bytes = storage.region.size_bytes
        if size_bytes % num_slots:
            allowed = f"a multiple of {num_slots} slots"
            raise StorageError("storage", f"{size_bytes} bytes", allowed)
        self.batch_blocks = batch_blocks
        self._storage = storage
        self._blocks = list(storage.tensor.view(num_slots, -1))

    def write(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """One copy a block."""
        for slot, row in zip(slots, rows, strict=True):
            self._blocks[slot].copy_(row)
        return [None] * len(slots)

    def read(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """One copy a block."""
        for slot, row in zip(slots, rows, strict=True):
            row.copy_(self._blocks[slot])
        return [None] * len(slots)

    def close(self) -> None:
        """Give the memory back."""
        self._blocks.clear()
        self._storage.close()


class DiskSlots:
    """Slots in a file. Rows that begin at pages and fill whole ones (`aligned_rows`) are read and
    written where they are, by any thread; others pass through one buffer, a batch at a time.
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
        """Blocking; at most a batch."""
        if self._is_aligned(rows):
            return _told(self._disk.write(slots, list(map(_memory, rows))))
        staged = self._staged[: len(slots)]
        with self._staging:
            for stage, row in zip(staged, rows, strict=True):
                stage.copy_(row)
            return _told(self._disk.write(slots, self._strides[: len(slots)]))

    def read(self, slots: Sequence[int], rows: Sequence[Tensor]) -> list[StorageError | None]:
        """Blocking; at most a batch."""
        if self._is_aligned(rows):
            return _told(self._disk.read(slots, list(map(_memory, rows))))
        with self._staging:
            errors = _told(self._disk.read(slots, self._strides[: len(slots)]))
            for stage, row in zip(self._staged[: len(slots)], rows, strict=True):
                row.copy_(stage)
        return errors

    def close(self) -> None:
        """Let the file go; it stays."""
        self._disk.close()

    def _is_aligned(self, rows: Sequence[Tensor]) -> bool:
        if self._block_bytes != self._disk.stride_bytes:
            return False
        return not any(row.data_ptr() % PAGE_BYTES for row in rows)


def aligned_rows(num_rows: int, row_bytes: int) -> Tensor:
    """(rows, row bytes) uint8 on the host that begin at a page: what a disk takes as it is, if a
    row is whole pages.
    """
    memory = aligned_buffer(max(num_rows * row_bytes, 1))
    with torch.inference_mode(mode=False):  # an engine may be in it, and a tier's thread is not
        rows = torch.frombuffer(memory, dtype=torch.uint8)[: num_rows * row_bytes]
        return rows.view(num_rows, -1)


def _memory(row: Tensor) -> memoryview:
    return row.numpy().data


def _told(errors: Sequence[OSError | None]) -> list[StorageError | None]:
    return [
        None if error is None else StorageError("disk", str(error.strerror), "a disk that works")
        for error in errors
    ]
