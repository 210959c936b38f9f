"""What a process keeps for its next start: a folder, which only one process may use.

    lock                          held while the process lives
    workers.json                  who was registered, and operators' orders
    engines/{worker}.{rank}.state what is known of each rank's engine; see `publisher/feed_state`

A file that can not be used is kept aside, so that somebody can look at it.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_hexdigest

from router.process.own_folder import own_folder
from router.protocol.catalogue import Lifecycle
from router.protocol.values import Rank
from router.protocol.workers import WorkerRegistration
from router.publisher.feed_state import replace_file
from router.registration_errors import DataDirError

log = logging.getLogger(__name__)

VERSION = 1


class Kept(Struct, frozen=True):
    """Who was registered; `orders`: what operators want of workers, where no bus keeps it."""

    workers: list[WorkerRegistration] = []
    orders: dict[int, Lifecycle] = {}


class _File(Struct, frozen=True):
    version: int
    checksum: str
    kept: msgspec.Raw


class DataDir:
    """One folder, made where there is none. To be used only while it is `ours`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers = folder / "workers.json"
        self._engines = folder / "engines"

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Nobody else's inside. Raises ConfigError."""
        with own_folder(self._folder, self._engines.name):
            yield

    def state_path(self, rank: Rank) -> Path:
        """Where the state of a rank's engine is kept."""
        return self._engines / f"{rank}.state"

    def drop_state(self, rank: Rank) -> None:
        """Forget what is kept of a rank's engine."""
        self.state_path(rank).unlink(missing_ok=True)

    def load(self) -> Kept:
        """What was kept; nothing, where there is nothing, or nothing that can be used."""
        try:
            return _decoded(self._workers.read_bytes())
        except FileNotFoundError:
            return Kept()
        except (OSError, ValueError, msgspec.DecodeError) as error:
            aside = self._workers.with_name(f"workers.json.damaged-{time.time_ns() // 1000}")
            log.error(
                "%s can not be used: %s; starting without the workers in it. It is kept as %s",
                self._workers,
                error,
                aside.name,
            )
            self._workers.replace(aside)
            return Kept()

    def save(self, kept: Kept) -> None:
        """Keep this: after a crash at any moment there is the former content, or this. Waits for
        the disk. Raises DataDirError.
        """
        body = msgspec.json.encode(kept)
        content = msgspec.json.encode(_File(VERSION, xxh3_64_hexdigest(body), msgspec.Raw(body)))
        try:
            replace_file(self._workers, content)
        except OSError as error:
            raise DataDirError(str(self._workers), str(error)) from error


def _decoded(content: bytes) -> Kept:
    """Raises ValueError, msgspec.DecodeError."""
    file = msgspec.json.decode(content, type=_File)
    if file.version != VERSION:
        raise ValueError(f"version {file.version} (allowed: {VERSION})")
    if xxh3_64_hexdigest(bytes(file.kept)) != file.checksum:
        raise ValueError("its checksum differs")
    return msgspec.json.decode(bytes(file.kept), type=Kept)
