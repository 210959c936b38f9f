"""Memory that is reserved at once, and allocated page by page as it is touched."""

import contextlib
import mmap
from typing import Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

N = TypeVar("N", bound=np.generic)

LARGE_BYTES = 1 << 20

PART_BYTES = 5 * 40 * 4096
"""Bytes given back at once: whole pages, in about 30 µs, and whole slots of 4 and 40 bytes."""


def reserve(length: int, kind: type[N]) -> npt.NDArray[N]:
    """Return an array of zeros; each 4 KB page is allocated when it is first written."""
    return np.frombuffer(_mapped(length * np.dtype(kind).itemsize), kind)


def zeros(length: int, kind: type[N]) -> npt.NDArray[N]:
    """Return an array of zeros, reserved if it is large: clearing it would take too long."""
    is_large = length * np.dtype(kind).itemsize >= LARGE_BYTES
    return reserve(length, kind) if is_large else np.zeros(length, kind)


class NextTable(Generic[N]):
    """The slots of a table that will replace another one.

    They are touched part by part in advance: moving into the table then causes no page faults,
    which would cost more than the moves.
    """

    __slots__ = ("_touched", "slots")

    def __init__(self, length: int, kind: type[N]) -> None:
        self.slots = zeros(length, kind)
        self._touched = 0

    def touch(self, share: float) -> None:
        """Allocate this share of the slots, but at most one part more than before."""
        start, itemsize = self._touched, self.slots.itemsize
        end = min(int(share * len(self.slots)), start + PART_BYTES // itemsize)
        page = mmap.PAGESIZE // itemsize
        if end > start:
            self.slots[start:end:page] = 0
            self._touched += -(-(end - start) // page) * page


class PreviousTable(Generic[N]):
    """The slots of a table that is being replaced.

    They are emptied from a starting slot on, around the end, and given back part by part, because
    freeing a large table at once takes milliseconds.

    `width`: numbers per slot; `mark`: the number that is 0 in an empty slot.
    """

    __slots__ = ("_marks", "_part_slots", "_released", "slots")

    def __init__(self, slots: npt.NDArray[N], width: int, mark: int, start: int) -> None:
        self.slots = slots.reshape(-1, width)
        self._marks = self.slots[:, mark]
        self._part_slots = max(PART_BYTES // (width * slots.itemsize), 1)
        self._released = -(-start // self._part_slots) * self._part_slots

    def release(self, moved: int) -> None:
        """Give back the memory of the slots before this one, from which all keys were moved.

        A part that has keys, because they came around the end, is kept.
        """
        end = min(moved, len(self.slots)) // self._part_slots * self._part_slots
        if end <= self._released or self.slots.nbytes < LARGE_BYTES:
            return
        start, self._released = self._released, end
        if not self._marks[start:end].any():
            width_bytes = self.slots.strides[0]
            _memory_of(self.slots).madvise(
                mmap.MADV_DONTNEED, start * width_bytes, (end - start) * width_bytes
            )


class GrowingWords(Generic[N]):
    """An array that grows without being copied: the system moves its pages, in about 1 ns per KB.

    References to `words` must be dropped before the next growth, which otherwise copies all.
    """

    __slots__ = ("_kind", "_memory", "words")

    _memory: mmap.mmap
    words: npt.NDArray[N]

    def __init__(self, length: int, kind: type[N]) -> None:
        self._kind = kind
        self._look(_mapped(length * np.dtype(kind).itemsize))

    def grow(self, length: int) -> None:
        """Grow to `length` words; the new ones are zeros."""
        size = length * self.words.itemsize
        del self.words  # A view of the memory keeps it from moving.
        try:
            self._memory.resize(size)
        except BufferError:  # There is another view of it.
            memory = _mapped(size)
            memory[: len(self._memory)] = self._memory[:]
            self._memory = memory
        self._look(self._memory)

    def _look(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.words = np.frombuffer(memory, self._kind)


def _mapped(size_bytes: int) -> mmap.mmap:
    """Return new memory without huge pages.

    Clearing 2 MB holds lookups up for 2 ms at a time (10 M blocks, 99th percentile 1,893 µs against
    104), and cold lookups are as fast without.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _memory_of(reserved: npt.NDArray[N]) -> mmap.mmap:
    base = reserved.base
    while isinstance(base, np.ndarray):
        base = base.base
    return cast(mmap.mmap, cast(memoryview, base).obj)
