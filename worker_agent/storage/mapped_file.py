"""A file mapped into memory, which one process has at a time and which outlives it."""

import fcntl
import mmap
import os
from pathlib import Path

from worker_agent.storage.own_file import own_file


class MappedFile:
    """`buffer` is the file: what is written there is in it, also if this process is killed.

    In a directory of memory (`/dev/shm`) that is named shared memory.
    """

    __slots__ = ("_descriptor", "buffer", "is_new", "path")

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Open it, or make it, zeroed. One of another size is made anew.

        Raises StorageError when it cannot be had, or another process has it.
        """
        self.path = path
        with own_file(path) as self._descriptor:
            self.is_new = self._prepare(size_bytes)
            self.buffer = mmap.mmap(self._descriptor, size_bytes)

    def close(self) -> None:
        """Let it go. Whoever still has a view of `buffer` keeps it mapped, but it is another's."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping has the file open, too
        os.close(self._descriptor)

    def remove(self) -> None:
        """No later process is to find it."""
        self.path.unlink(missing_ok=True)

    def _prepare(self, size_bytes: int) -> bool:
        if os.fstat(self._descriptor).st_size == size_bytes:
            return False
        os.ftruncate(self._descriptor, 0)
        os.posix_fallocate(self._descriptor, 0, size_bytes)
        return True
