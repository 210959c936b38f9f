"""The folder in which a process keeps state for its next start; one process may use it.

    lock                          held while the process lives
    workers.json                  the registered workers, and operators' orders
    engines/{worker}.{rank}.state the state of each rank's engine; see `publisher/feed_state`

A file that cannot be used is renamed and kept, for inspection.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_hexdigest

from router.ingest.errors import DataDirError
from router.protocol.catalogue import Lifecycle
from router.protocol.values import UNREADABLE, Rank
from router.protocol.workers import WorkerRegistration
from router.publisher.follower.state import replace_file
from router.runtime.own_files import exclusive_dir

log = logging.getLogger(__name__)

VERSION = 1


class Kept(Struct, frozen=True):
    """The registered workers. `orders`: operators' orders by worker, if no bus keeps them."""

    workers: list[WorkerRegistration] = []
    orders: dict[int, Lifecycle] = {}


class _File(Struct, frozen=True):
    version: int
    checksum: str
    kept: msgspec.Raw


class DataDir:
    """One folder, created if it does not exist. To be used only while it is `ours`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers = folder / "workers.json"
        self._engines = folder / "engines"

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Lock the folder for this process. Raises ConfigError if another process uses it."""
        with exclusive_dir(self._folder, self._engines.name):
            yield

    def state_path(self, rank: Rank) -> Path:
        """Return the path of the state file of a rank's engine."""
        return self._engines / f"{rank}.state"

    def drop_state(self, rank: Rank) -> None:
        """Delete the state of a rank's engine."""
        self.state_path(rank).unlink(missing_ok=True)

    def load(self) -> Kept:
        """Return what was kept. Returns an empty `Kept` if there is none, or it cannot be used."""
        try:
            return _decoded(self._workers.read_bytes())
        except FileNotFoundError:
            return Kept()
        except (OSError, ValueError, *UNREADABLE) as error:
            aside = self._workers.with_name(f"workers.json.damaged-{time.time_ns() // 1000}")
            log.error(
                "%s cannot be used: %s; starting without the workers in it. The file is kept as %s",
                self._workers,
                error,
                aside.name,
            )
            self._workers.replace(aside)
            return Kept()

    def save(self, kept: Kept) -> None:
        """Save the workers and orders atomically: a crash leaves the former content or the new one.

        Waits for the disk. Raises DataDirError.
        """
        body = msgspec.json.encode(kept)
        content = msgspec.json.encode(_File(VERSION, xxh3_64_hexdigest(body), msgspec.Raw(body)))
        try:
            replace_file(self._workers, content)
        except OSError as error:
            raise DataDirError(str(self._workers), str(error)) from error


def _decoded(content: bytes) -> Kept:
    """Decode a file. Raises ValueError, msgspec.DecodeError."""
    file = msgspec.json.decode(content, type=_File)
    if file.version != VERSION:
        raise ValueError(f"version {file.version} (allowed: {VERSION})")
    if xxh3_64_hexdigest(bytes(file.kept)) != file.checksum:
        raise ValueError("its checksum differs")
    return msgspec.json.decode(bytes(file.kept), type=Kept)
