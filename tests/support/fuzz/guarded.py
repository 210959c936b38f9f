"""Memory that ends at a page without access: a kernel that reads or writes on is killed."""

import ctypes
import mmap

import numpy as np

_PROT_NONE = 0


class GuardedRegion:
    """Room for arrays that end exactly at the guard page."""

    def __init__(self, size_bytes):
        page = mmap.PAGESIZE
        self._size_bytes = -(-size_bytes // page) * page
        self._memory = mmap.mmap(-1, self._size_bytes + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(start + self._size_bytes)
        if libc.mprotect(address, ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        self._bytes = np.frombuffer(self._memory, np.uint8, self._size_bytes)

    def array(self, length, kind=np.uint8):
        """Return the array of this length that ends at the guard page."""
        size_bytes = length * np.dtype(kind).itemsize
        return self._bytes[self._size_bytes - size_bytes :].view(kind)

    def holding(self, data):
        """Return these bytes, the last one before the guard page."""
        array = self.array(len(data))
        array[:] = np.frombuffer(data, np.uint8)
        return array
