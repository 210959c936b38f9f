"""Where a fleet keeps its things: a folder that no other fleet uses."""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router.errors import ConfigError


@contextmanager
def fleet_folder(data_dir: str | None) -> Iterator[Path]:
    """A folder, made where there is none; without a name one that is gone afterwards. Raises
    ConfigError.
    """
    if data_dir is not None:
        with _ours(Path(data_dir)):
            yield Path(data_dir)
        return
    try:
        temporary = tempfile.TemporaryDirectory(prefix="kv-router-", ignore_cleanup_errors=True)
    except OSError as error:
        problem = f"no temporary folder can be made: {error.strerror}"
        raise ConfigError("data_dir", problem, "a folder, as --data-dir FOLDER") from error
    with temporary as directory:
        yield Path(directory)


@contextmanager
def _ours(folder: Path) -> Iterator[None]:
    """Two buses would write into one store."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        problem = f"{folder}: {error.strerror}"
        raise ConfigError("data_dir", problem, "a folder that can be written to") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = f"{folder} is in use"
            raise ConfigError("data_dir", problem, "a folder of its own for each fleet") from error
        yield
