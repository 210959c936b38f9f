"""Memory for blocks: on the host, pinned for a device, or on a device.

A storage is one range of bytes that users register with (a transfer agent, a peer's lease). It is
not freed while a user is registered: a user that still holds its address would write into memory of
another owner.
"""

from typing import Self

import torch
from torch import Tensor

from worker_agent.layout.layout import MemoryRegion
from worker_agent.storage.base import Registrations, StorageKind
from worker_agent.storage.errors import StorageError
from worker_agent.storage.mapped_file import MappedFile


class MemoryStorage:
    """Bytes that a tensor owns; `close` frees them."""

    __slots__ = ("_tensor", "kind", "registrations")

    def __init__(self, tensor: Tensor, kind: StorageKind) -> None:
        """Set up a storage on `tensor`: (bytes,) uint8, contiguous."""
        self._tensor: Tensor | None = tensor
        self.kind = kind
        self.registrations = Registrations()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tensor(self) -> Tensor:
        """The whole storage, (bytes,) uint8. Raises StorageError after `close`."""
        if self._tensor is None:
            raise StorageError("storage", "closed", "an open one")
        return self._tensor

    @property
    def region(self) -> MemoryRegion:
        """The address range, in the address space of its device."""
        return MemoryRegion(self.tensor.data_ptr(), self.tensor.numel())

    @property
    def device_id(self) -> int:
        """The index of the device; 0 on the host."""
        return self.tensor.device.index or 0

    def view(self, offset_bytes: int, size_bytes: int) -> Tensor:
        """Return a part of it without a copy. Raises StorageError if it is out of range."""
        total_bytes = self.tensor.numel()
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= total_bytes:
            reason = f"{offset_bytes} to {offset_bytes + size_bytes}"
            raise StorageError("bytes", reason, f"0 to {total_bytes}")
        return self.tensor[offset_bytes : offset_bytes + size_bytes]

    def close(self) -> None:
        """Release all registered users, then free the memory. Idempotent."""
        self.registrations.release_all()
        self._tensor = None


def host_memory(size_bytes: int) -> MemoryStorage:
    """Return zeroed memory of this process. Raises StorageError if there is not enough."""
    return MemoryStorage(_allocated(size_bytes, "cpu"), StorageKind.SYSTEM)


def pinned_memory(size_bytes: int) -> MemoryStorage:
    """Return host memory that a device can copy directly; unpinned without a device."""
    is_cuda = torch.cuda.is_available()
    kind = StorageKind.PINNED if is_cuda else StorageKind.SYSTEM
    return MemoryStorage(_allocated(size_bytes, "cpu", pin_memory=is_cuda), kind)


def device_memory(size_bytes: int, device: torch.device) -> MemoryStorage:
    """Return zeroed memory of a device. Raises StorageError if there is not enough."""
    return MemoryStorage(_allocated(size_bytes, device), StorageKind.DEVICE)


def _allocated(size_bytes: int, device: torch.device | str, *, pin_memory: bool = False) -> Tensor:
    if size_bytes < 1:
        raise StorageError("size_bytes", f"{size_bytes}", "at least 1")
    try:
        with torch.inference_mode(mode=False):  # the engine may use it, a tier's thread does not
            return torch.zeros(size_bytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    except RuntimeError as error:  # torch raises this if memory is exhausted
        reason = str(error).partition("\n")[0]
        raise StorageError("size_bytes", f"{size_bytes}: {reason}", "what is free") from error


def shared_memory(file: MappedFile) -> MemoryStorage:
    """Return named host memory, which outlives this process."""
    return _mapped(file, StorageKind.SHARED)


def disk_memory(file: MappedFile) -> MemoryStorage:
    """Return a file on a disk as memory; the kernel reads and writes its pages on access.

    The tiers use `DiskStorage` instead, whose calls report the error of each block.
    """
    return _mapped(file, StorageKind.DISK)


def _mapped(file: MappedFile, kind: StorageKind) -> MemoryStorage:
    tensor = torch.frombuffer(file.buffer, dtype=torch.uint8)
    storage = MemoryStorage(tensor, kind)
    storage.registrations.add("file", file.close)
    return storage
