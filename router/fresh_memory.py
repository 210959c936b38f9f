"""Memory that is reserved at once, and becomes real as it is touched."""

import contextlib
import mmap
from typing import Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

N = TypeVar("N", bound=np.generic)

LARGE_BYTES = 1 << 20

PART_BYTES = 5 * 40 * 4096
"""Given back at once: whole pages, some 30 µs, and whole slots of 4 and of 40 bytes."""


def reserve(length: int, kind: type[N]) -> npt.NDArray[N]:
    """An array of zeros whose pages become real, 4 KB at a time, when they are first written."""
    return np.frombuffer(_mapped(length * np.dtype(kind).itemsize), kind)


def zeros(length: int, kind: type[N]) -> npt.NDArray[N]:
    """The same where it is large: to clear it at once would take too long."""
    is_large = length * np.dtype(kind).itemsize >= LARGE_BYTES
    return reserve(length, kind) if is_large else np.zeros(length, kind)


class ComingTable(Generic[N]):
    """The slots of a table that will take the place of another, touched part by part before: who
    moves into it meets no fault of a page, which cost more than the moves.
    """

    __slots__ = ("_touched", "slots")

    def __init__(self, length: int, kind: type[N]) -> None:
        self.slots = zeros(length, kind)
        self._touched = 0

    def touch(self, share: float) -> None:
        """Make so much of it real, but at most a part more than was."""
        start, itemsize = self._touched, self.slots.itemsize
        end = min(int(share * len(self.slots)), start + PART_BYTES // itemsize)
        page = mmap.PAGESIZE // itemsize
        if end > start:
            self.slots[start:end:page] = 0
            self._touched += -(-(end - start) // page) * page


class FormerTable(Generic[N]):
    """The slots of a table that another one takes the place of, emptied from one of them on around
    the end, and given back part by part: to free a large one at once takes milliseconds.

    `width`: numbers a slot; `mark`: which of them is 0 in an empty one.
    """

    __slots__ = ("_marks", "_part_slots", "_released", "slots")

    def __init__(self, slots: npt.NDArray[N], width: int, mark: int, start: int) -> None:
        self.slots = slots.reshape(-1, width)
        self._marks = self.slots[:, mark]
        self._part_slots = max(PART_BYTES // (width * slots.itemsize), 1)
        self._released = -(-start // self._part_slots) * self._part_slots

    def release(self, moved: int) -> None:
        """All is empty up to this slot, except for keys that have come around the end."""
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
    """Such an array that grows without being copied: the system moves its pages, some 1 ns a KB.

    Whoever looks at `words` lets go of it before the next growth, which copies all otherwise.
    """

    __slots__ = ("_kind", "_memory", "words")

    _memory: mmap.mmap
    words: npt.NDArray[N]

    def __init__(self, length: int, kind: type[N]) -> None:
        self._kind = kind
        self._look(_mapped(length * np.dtype(kind).itemsize))

    def grow(self, length: int) -> None:
        """Make it so long; what is new is zeros."""
        size = length * self.words.itemsize
        del self.words  # who looks at memory keeps it from moving
        try:
            self._memory.resize(size)
        except BufferError:  # somebody looks at it
            memory = _mapped(size)
            memory[: len(self._memory)] = self._memory[:]
            self._memory = memory
        self._look(self._memory)

    def _look(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.words = np.frombuffer(memory, self._kind)


def _mapped(size_bytes: int) -> mmap.mmap:
    """Not in huge pages: to clear 2 MB holds searches up for 2 ms at a time (10 M blocks, 99th
    percentile 1,893 µs against 104), and cold searches are as fast without.
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
