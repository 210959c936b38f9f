"""A file mapped into memory, locked by one process at a time, which outlives that process.

It may be in a folder that all users can write to, such as /dev/shm: its name cannot be guessed
there, and files of other users are not opened.
"""

import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from router.runtime.own_files import open_own
from worker_agent.storage.errors import StorageError


def kept_path(folder: Path, stem: str, ending: str) -> Path:
    """Return the path of a file that an earlier process left, or of a new one.

    If other users can create files in the folder, a new name has a random part, so that none of
    them can be there first. Files of other users, and links, are not taken for one of ours.
    """
    plain = folder / f"{stem}{ending}"
    try:
        if not folder.stat().st_mode & 0o022:
            return plain
        pattern = re.compile(f"{re.escape(stem)}(-[0-9a-f]{{16}})?{re.escape(ending)}")
        with os.scandir(folder) as entries:
            named = [each for each in entries if pattern.fullmatch(each.name)]
            ours = sorted(each.name for each in named if _is_ours(each))
    except OSError:  # no such folder: opening the file fails, and says so
        return plain
    return folder / (ours[0] if ours else f"{stem}-{token_hex(8)}{ending}")


def _is_ours(entry: os.DirEntry[str]) -> bool:
    found = entry.stat(follow_symlinks=False)
    is_private = found.st_uid == os.getuid() and not found.st_mode & 0o077
    return is_private and (stat.S_ISREG(found.st_mode) or stat.S_ISSOCK(found.st_mode))


@contextmanager
def exclusive_file(path: Path) -> Iterator[int]:
    """Open or create a file and lock it; its descriptor stays open on success.

    Raises StorageError if it is not accessible or of another user, if another process has locked
    it, and for any OSError of the body; then it is closed.
    """
    try:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
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
