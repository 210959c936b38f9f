"""A sample of decisions, explained, one JSON object a line, written by a separate task.

    take ─ rate limit ─▶ bounded queue ─ task: explain, encode ─▶ thread: write

A line contains no tokens, salt, session or address. Decisions are dropped and counted if the queue
is full, or if the disk fails.
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, json

from router.core.core import RouterCore
from router.core.placement import Placement
from router.core.views.decisions import logged_decision, without_prompt
from router.errors import ConfigError
from router.protocol.requests import SelectRequest
from router.runtime.process.metrics import Rows, counter

log = logging.getLogger(__name__)

QUEUE_DECISIONS = 1_024
WRITE_INTERVAL_S = 0.2
LOGGED_CANDIDATES = 16
"""Candidates in a line: the chosen one, and the cheapest of the others."""


class _Taken(Struct, frozen=True, eq=False):
    at: float
    request: SelectRequest
    placement: Placement


class DecisionLog:
    """A writer of a sample of the decisions to a file."""

    def __init__(
        self,
        core: RouterCore,
        path: Path,
        per_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file, readable by its owner only. Raises ConfigError."""
        self._core = core
        self._clock = clock
        self._interval_s = 1 / per_s
        self._due_s = clock()
        self._queue: deque[_Taken] = deque()
        self._file = _RotatedFile(path, max_bytes)
        self._writing = threading.Lock()
        self.written = self.skipped = self.dropped = self.failed = 0

    def take(self, request: SelectRequest, placement: Placement) -> None:
        """Queue a decision to be logged, if the rate allows. Never waits, never raises."""
        now_s = self._clock()
        if now_s < self._due_s:
            self.skipped += 1
        elif len(self._queue) >= QUEUE_DECISIONS:
            self.dropped += 1
        else:
            self._due_s = max(self._due_s, now_s - 1.0) + self._interval_s
            self._queue.append(_Taken(time.time(), without_prompt(request), placement))

    async def run(self) -> None:
        """Write until cancelled, and then write the rest of the queue."""
        try:
            while True:
                await asyncio.sleep(WRITE_INTERVAL_S)
                await self._write_waiting()
        finally:
            self._write([self._line(taken) for taken in self._queue])
            self._file.close()

    async def _write_waiting(self) -> None:
        lines = []
        while self._queue:
            lines.append(self._line(self._queue.popleft()))
            await asyncio.sleep(0)
        if lines:
            await asyncio.to_thread(self._write, lines)

    def _write(self, lines: list[bytes]) -> None:
        with self._writing:
            for number, line in enumerate(lines):
                try:
                    self._file.write(line)
                except OSError as error:
                    self.failed += len(lines) - number
                    log.error("decision log: writing failed: %s", error)
                    return
                self.written += 1

    def _line(self, taken: _Taken) -> bytes:
        request, placement = taken.request, taken.placement
        line = logged_decision(
            self._core, request, placement, LOGGED_CANDIDATES, taken.at, self._clock()
        )
        return json.encode(line) + b"\n"


class _RotatedFile:
    """A file that is rotated when it is full; one former file is kept."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd = _open(path)
        self._bytes = os.fstat(self._fd).st_size

    def write(self, line: bytes) -> None:
        """Write a whole line. Raises OSError."""
        if self._bytes + len(line) > self._max_bytes and self._bytes:
            self._rotate()
        view = memoryview(line)
        while view:
            written = os.write(self._fd, view)
            self._bytes += written
            view = view[written:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _rotate(self) -> None:
        self._path.replace(f"{self._path}.1")
        fd = os.open(self._path, _FLAGS, 0o600)
        os.close(self._fd)
        self._fd, self._bytes = fd, 0


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _open(path: Path) -> int:
    try:
        return os.open(path, _FLAGS, 0o600)
    except OSError as error:
        allowed = "a file in a writable folder"
        raise ConfigError("decision_log", f"{path}: {error.strerror}", allowed) from error


DECISION_LOG_METRICS: Rows = {
    "written": counter("Decisions written to the log"),
    "skipped": counter("Decisions not written: over the rate limit"),
    "dropped": counter("Decisions dropped: the queue was full"),
    "failed": counter("Decisions not written: the disk failed"),
}
