"""A folder that only one process may use at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router.errors import ConfigError


@contextmanager
def exclusive_dir(folder: Path, *parts: str) -> Iterator[None]:
    """Lock a folder for this process, and create it with the subfolders `parts` if missing.

    Raises ConfigError for `data_dir`.
    """
    try:
        for each in (folder, *(folder / part for part in parts)):
            each.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        problem = f"{folder}: {error.strerror}"
        raise ConfigError("data_dir", problem, "a folder that can be written to") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = f"{folder} is in use"
            raise ConfigError("data_dir", problem, "a separate folder for each process") from error
        yield
