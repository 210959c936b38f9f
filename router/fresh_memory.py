"""Memory that is reserved at once, and becomes real as it is touched."""

import contextlib
import mmap
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

N = TypeVar("N", bound=np.generic)


def reserve(length: int, kind: type[N]) -> npt.NDArray[N]:
    """An array of zeros whose pages become real, 4 KB at a time, when they are first written.

    Not in huge pages: to clear 2 MB holds searches up for 2 ms at a time (10 M blocks, 99th
    percentile 1,893 µs against 104), and cold searches are as fast without.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, length * np.dtype(kind).itemsize, flags=flags)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind)


def release(part: npt.NDArray[np.generic], whole: npt.NDArray[np.generic]) -> None:
    """Give back the pages of a part of what was reserved, which holds zeros from then on. The part
    consists of whole pages.
    """
    memory = cast(mmap.mmap, cast(memoryview, whole.base).obj)
    memory.madvise(mmap.MADV_DONTNEED, part.ctypes.data - whole.ctypes.data, part.nbytes)
