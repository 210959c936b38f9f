"""A file mapped into memory, locked by one process at a time, which outlives that process."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker_agent.storage.errors import StorageError


@contextmanager
def exclusive_file(path: Path) -> Iterator[int]:
    """Open or create a file and lock it; its descriptor stays open on success.

    Raises StorageError if it is not accessible, if another process has locked it, and for any
    OSError of the body; then it is closed.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield descriptor
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        allowed = "a file not locked by another process, with free space for it"
        raise StorageError("path", f"{path}: {error.strerror}", allowed) from error


class MappedFile:
    """A mapped file: writes to `buffer` are in the file, even if this process is killed.

    In a directory in memory (`/dev/shm`), this is named shared memory.
    """

    __slots__ = ("_descriptor", "buffer", "is_new", "path")

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Open the file, or create it with zeros; one of another size is recreated.

        Raises StorageError if it is not accessible, or if another process has locked it.
        """
        self.path = path
        with exclusive_file(path) as self._descriptor:
            self.is_new = self._prepare(size_bytes)
            self.buffer = mmap.mmap(self._descriptor, size_bytes)

    def close(self) -> None:
        """Close and unlock the file. Existing views of `buffer` keep it mapped."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping also keeps the file open
        os.close(self._descriptor)

    def remove(self) -> None:
        """Delete the file, so that no later process finds it."""
        self.path.unlink(missing_ok=True)

    def _prepare(self, size_bytes: int) -> bool:
        if os.fstat(self._descriptor).st_size == size_bytes:
            return False
        os.ftruncate(self._descriptor, 0)
        os.posix_fallocate(self._descriptor, 0, size_bytes)
        return True
