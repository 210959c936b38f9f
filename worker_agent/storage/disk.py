"""Blocks in one file, at aligned offsets, past the page cache where the file system can.

Adjacent blocks are read and written in one call. What the file system lacks is done without, step
by step, and told (`abilities`): O_DIRECT, room reserved at once, room reserved by writing zeros.
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

from router.block_errors import StorageError
from worker_agent.layout.strides import round_up
from worker_agent.storage.own_file import own_file

PAGE_BYTES = 4096
ZERO_BYTES = 16 * 1024 * 1024
_LACKING = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS})


Step: TypeAlias = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""


class Reserved(StrEnum):
    """How sure it is that there is room for all blocks."""

    ALLOCATED = "allocated"
    ZEROED = "zeroed"
    SPARSE = "sparse"
    """Not at all: the disk may be full when a block is written."""


class DiskAbilities(Struct, frozen=True):
    """What the file system could do."""

    is_direct: bool
    reserved: Reserved


class DiskStorage:
    """`num_blocks` blocks of `block_bytes` in a file; blocking calls, for a thread.

    Buffers are any page-aligned memory of whole strides (`aligned_buffer`): a block takes
    `stride_bytes` there as in the file.
    """

    __slots__ = ("_descriptor", "abilities", "num_blocks", "path", "stride_bytes")

    def __init__(
        self, path: Path, num_blocks: int, block_bytes: int, *, zero_fill: bool = False
    ) -> None:
        """`zero_fill`: where room cannot be reserved at once, reserve it by writing zeros.

        Raises StorageError when there is no room, and when another process has the file.
        """
        self.path = path
        self.num_blocks = num_blocks
        self.stride_bytes = round_up(block_bytes, PAGE_BYTES)
        with own_file(path) as self._descriptor:
            reserved = self._reserve(zero_fill=zero_fill)
            self.abilities = DiskAbilities(self._go_direct(), reserved)

    def read(self, blocks: Sequence[int], buffer: memoryview) -> list[OSError | None]:
        """Read blocks into the strides of `buffer`, in order; what went wrong with each, if
        anything did. Raises StorageError for a block that is none, and a buffer that is too small.
        """
        return self._transfer(blocks, buffer, os.preadv)

    def write(self, blocks: Sequence[int], buffer: memoryview) -> list[OSError | None]:
        """Write the strides of `buffer` to blocks, in order; like `read`."""
        return self._transfer(blocks, buffer, os.pwritev)

    def close(self) -> None:
        """Let the file go; it stays."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """No later process is to find it."""
        self.path.unlink(missing_ok=True)

    def _transfer(
        self, blocks: Sequence[int], buffer: memoryview, step: Step
    ) -> list[OSError | None]:
        self._check(blocks, buffer)
        errors: list[OSError | None] = []
        for first, count in _runs(blocks):
            error = self._move(blocks[first], first, count, buffer, step)
            if error is None or count == 1:
                errors += [error] * count
                continue
            # Which of them it was, one by one says.
            each = range(first, first + count)
            errors += [self._move(blocks[i], i, 1, buffer, step) for i in each]
        return errors

    def _move(
        self, block: int, place: int, count: int, buffer: memoryview, step: Step
    ) -> OSError | None:
        """Whole adjacent blocks, in as many calls as the system makes of it."""
        start, size_bytes = place * self.stride_bytes, count * self.stride_bytes
        done = 0
        while done < size_bytes:
            part = buffer[start + done : start + size_bytes]
            try:
                moved = step(self._descriptor, [part], block * self.stride_bytes + done)
            except OSError as error:
                return error
            if not moved:
                return OSError(errno.EIO, "the file ends here")
            done += moved
        return None

    def _check(self, blocks: Sequence[int], buffer: memoryview) -> None:
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise StorageError("block", f"{block}", f"0 to {self.num_blocks - 1}")
        needed_bytes = len(blocks) * self.stride_bytes
        if buffer.nbytes < needed_bytes:
            raise StorageError("buffer", f"{buffer.nbytes} bytes", f"at least {needed_bytes}")

    def _reserve(self, *, zero_fill: bool) -> Reserved:
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
    """Memory that begins at a page."""
    return memoryview(mmap.mmap(-1, size_bytes))


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where runs of adjacent blocks begin in the list, and how long they are."""
    first = 0
    for place in range(1, len(blocks) + 1):
        if place == len(blocks) or blocks[place] != blocks[place - 1] + 1:
            yield first, place - first
            first = place
