"""Files that may change while a process runs: tokens, certificates.

What cannot be used is told and counted, and what was read before counts on: a file that is being
written, or a typing error, takes nobody's access.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from router.errors import ConfigError

log = logging.getLogger(__name__)

POLL_S = 1.0

Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class ReloadedFiles:
    """Some files that count together; `reload` reads them, and raises ConfigError.

    `failures` counts readings that could not be used.
    """

    __slots__ = ("_files", "_reload", "_seen", "failures", "what")

    def __init__(self, what: str, files: Sequence[Path], reload: Callable[[], None]) -> None:
        self.what = what
        self.failures = 0
        self._files = tuple(files)
        self._reload = reload
        self._seen = self._signature()

    def look(self) -> None:
        """Read them if they have changed."""
        if self._signature() != self._seen:
            self.read()

    def read(self) -> str:
        """Read them, changed or not; what came of it, in words."""
        self._seen = self._signature()
        try:
            self._reload()
        except ConfigError as error:
            self.failures += 1
            log.error("%s: what was read before counts on: %s", self.what, error)
            return f"{self.what}: unusable, as before"
        log.info("%s: read again", self.what)
        return f"{self.what}: read again"

    def _signature(self) -> Signature:
        """Time, size and place of each; None for one that is not there."""
        return tuple(_signature(path) for path in self._files)


async def look_forever(watched: Sequence[ReloadedFiles]) -> None:
    """Look at all of them, again and again, until cancelled."""
    while True:
        await asyncio.sleep(POLL_S)
        for files in watched:
            files.look()


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
