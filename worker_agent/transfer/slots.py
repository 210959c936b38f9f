"""The bytes of a slower tier, slot by slot: in host memory, or in a file."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from router.block_errors import StorageError
from worker_agent.storage.disk import DiskStorage, aligned_buffer
from worker_agent.storage.memory import MemoryStorage


class Slots(Protocol):
    """Room for blocks. `rows`: (n, block bytes) uint8 on the host, contiguous; `rows[i]` is the
    block in `slots[i]`. What went wrong with each block is the answer, in order.
    """

    def write(self, slots: Sequence[int], rows: Tensor) -> list[StorageError | None]:
        """Rows into slots."""

    def read(self, slots: Sequence[int], rows: Tensor) -> list[StorageError | None]:
        """Slots into rows."""


class MemorySlots:
    """Slots side by side in one memory, which is the host's."""

    __slots__ = ("_blocks", "_storage")

    def __init__(self, storage: MemoryStorage, num_slots: int) -> None:
        """Raises StorageError for memory that is not so many equal slots."""
        size_bytes = storage.region.size_bytes
        if size_bytes % num_slots:
            allowed = f"a multiple of {num_slots} slots"
            raise StorageError("storage", f"{size_bytes} bytes", allowed)
        self._storage = storage
        self._blocks = storage.tensor.view(num_slots, -1)

    def write(self, slots: Sequence[int], rows: Tensor) -> list[StorageError | None]:
        """Memory does not fail."""
        for slot, row in zip(slots, rows, strict=False):
            self._blocks[slot].copy_(row)
        return [None] * len(slots)

    def read(self, slots: Sequence[int], rows: Tensor) -> list[StorageError | None]:
        """Memory does not fail."""
        for slot, row in zip(slots, rows, strict=False):
            row.copy_(self._blocks[slot])
        return [None] * len(slots)


class DiskSlots:
    """Slots in a file. Blocks pass through a buffer of `batch` strides, aligned for the device."""

    __slots__ = ("_batch", "_block_bytes", "_buffer", "_disk", "_memory")

    def __init__(self, disk: DiskStorage, block_bytes: int, batch: int) -> None:
        self._disk = disk
        self._batch = batch
        self._block_bytes = block_bytes
        self._memory = aligned_buffer(batch * disk.stride_bytes)
        strides = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._buffer = strides.view(batch, disk.stride_bytes)

    def write(self, slots: Sequence[int], rows: Tensor) -> list[StorageError | None]:
        """Blocking, a batch at a time."""
        errors: list[StorageError | None] = []
        for start in range(0, len(slots), self._batch):
            part = slots[start : start + self._batch]
            columns = self._buffer[: len(part), : self._block_bytes]
            columns.copy_(rows[start : start + len(part)])
            errors += _told(self._disk.write(part, self._memory))
        return errors

    def read(self, slots: Sequence[int], rows: Tensor) -> list[StorageError | None]:
        """Blocking, a batch at a time."""
        errors: list[StorageError | None] = []
        for start in range(0, len(slots), self._batch):
            part = slots[start : start + self._batch]
            errors += _told(self._disk.read(part, self._memory))
            columns = self._buffer[: len(part), : self._block_bytes]
            rows[start : start + len(part)].copy_(columns)
        return errors


def _told(errors: Sequence[OSError | None]) -> list[StorageError | None]:
    return [
        None if error is None else StorageError("disk", str(error.strerror), "a disk that works")
        for error in errors
    ]
