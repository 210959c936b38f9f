"""Blocks in one file, at aligned offsets, bypassing the page cache where possible.

Adjacent blocks are read and written in one call. Each feature that the file system lacks is
replaced by the next best and reported (`abilities`): O_DIRECT, preallocated space, space reserved
by writing zeros.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from worker_agent.layout.layout import MemoryRegion
from worker_agent.layout.strides import round_up
from worker_agent.storage.base import Registrations, StorageKind
from worker_agent.storage.errors import StorageError
from worker_agent.storage.mapped_file import exclusive_file

PAGE_BYTES = 4096
ZERO_BYTES = 16 * 1024 * 1024
MAX_BUFFERS = 1024
"""Limit of buffers in one call (IOV_MAX)."""
_LACKING = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS})


Step: TypeAlias = Callable[[int, Sequence[memoryview], int], int]
"""The type of `os.preadv` and `os.pwritev`."""


class Reserved(StrEnum):
    """The degree to which space for all blocks is reserved."""

    ALLOCATED = "allocated"
    ZEROED = "zeroed"
    SPARSE = "sparse"
    """No space is reserved: the disk may be full when a block is written."""


class DiskAbilities(Struct, frozen=True):
    """The features that the file system supports."""

    is_direct: bool
    reserved: Reserved


class DiskStorage:
    """`num_blocks` blocks of `block_bytes` in a file; calls block, so use a thread.

    A buffer holds one block, has `stride_bytes` bytes as in the file, and begins at a page boundary
    (`aligned_buffer`).
    """

    __slots__ = (
        "_descriptor",
        "_is_open",
        "abilities",
        "num_blocks",
        "path",
        "registrations",
        "stride_bytes",
    )
    kind = StorageKind.DISK
    device_id = 0

    def __init__(
        self,
        path: Path,
        num_blocks: int,
        block_bytes: int,
        *,
        zero_fill: bool = False,
        wants_direct: bool = True,
    ) -> None:
        """Open or create the file, and reserve its space.

        `zero_fill`: reserve space by writing zeros if it cannot be preallocated. `wants_direct`:
        bypass the page cache if the file system supports that.

        Raises StorageError if there is no space, or if another process has locked the file.
        """
        self.path = path
        self.num_blocks = num_blocks
        self.stride_bytes = round_up(block_bytes, PAGE_BYTES)
        with exclusive_file(path) as self._descriptor:
            reserved = self._reserve(zero_fill=zero_fill)
            self.abilities = DiskAbilities(wants_direct and self._go_direct(), reserved)
        self.registrations = Registrations()
        self._is_open = True

    @property
    def region(self) -> MemoryRegion:
        """The whole file, by offset. Raises StorageError after `close`."""
        if not self._is_open:
            raise StorageError("storage", "closed", "an open one")
        return MemoryRegion(0, self.num_blocks * self.stride_bytes)

    def read(self, blocks: Sequence[int], buffers: Sequence[memoryview]) -> list[OSError | None]:
        """Read each block into its buffer. Returns the error of each block, or None.

        Raises StorageError for an invalid block, and for too few or too small buffers.
        """
        return self._transfer(blocks, buffers, os.preadv)

    def write(self, blocks: Sequence[int], buffers: Sequence[memoryview]) -> list[OSError | None]:
        """Write each buffer to its block; errors as for `read`."""
        return self._transfer(blocks, buffers, os.pwritev)

    def close(self) -> None:
        """Release all registered users, and close the file, which remains. Idempotent."""
        self.registrations.release_all()
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def remove(self) -> None:
        """Delete the file, so that no later process finds it."""
        self.path.unlink(missing_ok=True)

    def _transfer(
        self, blocks: Sequence[int], buffers: Sequence[memoryview], step: Step
    ) -> list[OSError | None]:
        self._check(blocks, buffers)
        errors: list[OSError | None] = []
        for first, count in _runs(blocks):
            run = buffers[first : first + count]
            error = self._move(blocks[first], run, step)
            if error is None or count == 1:
                errors += [error] * count
                continue
            # Repeat the transfer block by block, to find the failed ones.
            errors += [self._move(blocks[first + i], run[i : i + 1], step) for i in range(count)]
        return errors

    def _move(self, block: int, buffers: Sequence[memoryview], step: Step) -> OSError | None:
        """Transfer adjacent blocks, in the system calls needed. Returns the error, if any."""
        stride = self.stride_bytes
        done, size_bytes = 0, len(buffers) * stride
        while done < size_bytes:
            first, *rest = buffers[done // stride :]
            try:
                moved = step(
                    self._descriptor, [first[done % stride :], *rest], block * stride + done
                )
            except OSError as error:
                return error
            if not moved:
                return OSError(errno.EIO, "unexpected end of the file")
            done += moved
        return None

    def _check(self, blocks: Sequence[int], buffers: Sequence[memoryview]) -> None:
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise StorageError("block", f"{block}", f"0 to {self.num_blocks - 1}")
        if len(buffers) < len(blocks):
            raise StorageError("buffers", f"{len(buffers)}", f"{len(blocks)}, one per block")
        for buffer in buffers:
            if buffer.nbytes != self.stride_bytes:
                allowed = f"{self.stride_bytes}"
                raise StorageError("buffers", f"one of {buffer.nbytes} bytes", allowed)

    def _reserve(self, *, zero_fill: bool) -> Reserved:
        """Reserve space by the first method that the file system supports."""
        size_bytes = self.num_blocks * self.stride_bytes
        if os.fstat(self._descriptor).st_size > size_bytes:
            os.ftruncate(self._descriptor, size_bytes)
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno not in _LACKING:
                raise
        else:
            return Reserved.ALLOCATED
        if zero_fill:
            self._write_zeros(os.fstat(self._descriptor).st_size, size_bytes)
            return Reserved.ZEROED
        os.ftruncate(self._descriptor, size_bytes)
        return Reserved.SPARSE

    def _write_zeros(self, start: int, end: int) -> None:
        zeros = bytes(ZERO_BYTES)
        while start < end:
            part = zeros[: min(ZERO_BYTES, end - start)]
            start += os.pwrite(self._descriptor, part, start)

    def _go_direct(self) -> bool:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._descriptor, [aligned_buffer(PAGE_BYTES)], 0)
        except OSError as error:
            if error.errno not in _LACKING:
                raise
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return False
        return True


def aligned_buffer(size_bytes: int) -> memoryview:
    """Return page-aligned memory."""
    return memoryview(mmap.mmap(-1, size_bytes))


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start index and the length of each run of adjacent blocks."""
    first = 0
    for place in range(1, len(blocks) + 1):
        is_end = place == len(blocks) or place - first == MAX_BUFFERS
        if is_end or blocks[place] != blocks[place - 1] + 1:
            yield first, place - first
            first = place
