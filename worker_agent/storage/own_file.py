"""A file that one process has at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router.block_errors import StorageError


@contextmanager
def own_file(path: Path) -> Iterator[int]:
    """Open a file, or make it, and lock it; its descriptor stays open if nothing goes wrong.

    Raises StorageError when it cannot be had, when another process has it, and for what the
    system says of it in the body; then it is closed.
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
        allowed = "a file that no other process has, and room for it"
        raise StorageError("path", f"{path}: {error.strerror}", allowed) from error
