"""Memory that blocks lie in: on the host, pinned for a device, or on a device.

A storage is one run of bytes that others register with (a transfer agent, a peer's lease). While
anybody is registered it is not given back: whoever still holds its address would write into memory
that belongs to another.
"""

from typing import Self

import torch
from torch import Tensor

from router.block_errors import StorageError
from worker_agent.layout.layout import MemoryRegion
from worker_agent.storage.base import Registrations, StorageKind
from worker_agent.storage.mapped_file import MappedFile


class MemoryStorage:
    """Bytes that a tensor owns; `close` gives them back."""

    __slots__ = ("_tensor", "kind", "registrations")

    def __init__(self, tensor: Tensor, kind: StorageKind) -> None:
        """`tensor`: (bytes,) uint8, contiguous."""
        self._tensor: Tensor | None = tensor
        self.kind = kind
        self.registrations = Registrations()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tensor(self) -> Tensor:
        """All of it, (bytes,) uint8. Raises StorageError once it is closed."""
        if self._tensor is None:
            raise StorageError("storage", "closed", "an open one")
        return self._tensor

    @property
    def region(self) -> MemoryRegion:
        """Where it lies, in the addresses of its own device."""
        return MemoryRegion(self.tensor.data_ptr(), self.tensor.numel())

    @property
    def device_id(self) -> int:
        """Which of several devices; 0 on the host."""
        return self.tensor.device.index or 0

    def view(self, offset_bytes: int, size_bytes: int) -> Tensor:
        """A part of it, not copied. Raises StorageError for one that is not within."""
        total_bytes = self.tensor.numel()
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= total_bytes:
            reason = f"{offset_bytes} to {offset_bytes + size_bytes}"
            raise StorageError("bytes", reason, f"0 to {total_bytes}")
        return self.tensor[offset_bytes : offset_bytes + size_bytes]

    def close(self) -> None:
        """Give it back, once everybody registered has let go; again is nothing."""
        self.registrations.release_all()
        self._tensor = None


def host_memory(size_bytes: int) -> MemoryStorage:
    """Memory of this process, zeroed. Raises StorageError when there is none."""
    return MemoryStorage(_allocated(size_bytes, "cpu"), StorageKind.SYSTEM)


def pinned_memory(size_bytes: int) -> MemoryStorage:
    """Host memory that a device copies from and to by itself; plain where there is no device."""
    is_cuda = torch.cuda.is_available()
    kind = StorageKind.PINNED if is_cuda else StorageKind.SYSTEM
    return MemoryStorage(_allocated(size_bytes, "cpu", pin_memory=is_cuda), kind)


def device_memory(size_bytes: int, device: torch.device) -> MemoryStorage:
    """Memory of a device, zeroed. Raises StorageError when there is none."""
    return MemoryStorage(_allocated(size_bytes, device), StorageKind.DEVICE)


def _allocated(size_bytes: int, device: torch.device | str, *, pin_memory: bool = False) -> Tensor:
    if size_bytes < 1:
        raise StorageError("size_bytes", f"{size_bytes}", "at least 1")
    try:
        with torch.inference_mode(mode=False):  # an engine may be in it, and a tier's thread is not
            return torch.zeros(size_bytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    except RuntimeError as error:  # torch says so of memory that is not there
        reason = str(error).partition("\n")[0]
        raise StorageError("size_bytes", f"{size_bytes}: {reason}", "what is free") from error


def shared_memory(file: MappedFile) -> MemoryStorage:
    """Host memory by a name, which outlives this process."""
    tensor = torch.frombuffer(file.buffer, dtype=torch.uint8)
    storage = MemoryStorage(tensor, StorageKind.SHARED)
    storage.registrations.add("file", file.close)
    return storage
