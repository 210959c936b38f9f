"""Some decisions, explained, a JSON line each; written by a task, never by who decides.

    take ─ at most so many a second ─▶ bounded queue ─ task: explain, encode ─▶ thread: write

A line has no tokens, no salt, no session and no address in it. What finds no room in the queue is
dropped and counted; so is what the disk does not take.
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, json
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core import RouterCore
from router.errors import ConfigError
from router.logged_decisions import logged_decision, without_prompt
from router.placement import Placement
from router.protocol.requests import SelectRequest

log = logging.getLogger(__name__)

QUEUE_DECISIONS = 1_024
WRITE_INTERVAL_S = 0.2
LOGGED_CANDIDATES = 16
"""The chosen one, and the cheapest of the others."""


class _Taken(Struct, frozen=True, eq=False):
    at: float
    request: SelectRequest
    placement: Placement


class DecisionLog(Collector):
    """Writes some of the decisions it is shown to a file."""

    def __init__(
        self,
        core: RouterCore,
        path: Path,
        per_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file, for its owner's eyes. Raises ConfigError."""
        self._core = core
        self._clock = clock
        self._interval_s = 1 / per_s
        self._due_s = clock()
        self._queue: deque[_Taken] = deque()
        self._file = _RotatedFile(path, max_bytes)
        self._writing = threading.Lock()
        self.written = self.skipped = self.dropped = self.failed = 0

    def take(self, request: SelectRequest, placement: Placement) -> None:
        """A decision was made; write it down if it is time for one. Never waits, never raises."""
        now_s = self._clock()
        if now_s < self._due_s:
            self.skipped += 1
        elif len(self._queue) >= QUEUE_DECISIONS:
            self.dropped += 1
        else:
            self._due_s = max(self._due_s, now_s - 1.0) + self._interval_s
            self._queue.append(_Taken(time.time(), without_prompt(request), placement))

    async def run(self) -> None:
        """Write until cancelled, and then what is left."""
        try:
            while True:
                await asyncio.sleep(WRITE_INTERVAL_S)
                await self._write_waiting()
        finally:
            self._write([self._line(taken) for taken in self._queue])
            self._file.close()

    def collect(self) -> Iterator[Metric]:
        """The totals of this moment."""
        yield _counter("written", "Decisions written down", self.written)
        yield _counter("skipped", "Decisions not written down: too many a second", self.skipped)
        yield _counter("dropped", "Decisions dropped: the queue was full", self.dropped)
        yield _counter("failed", "Decisions that the disk did not take", self.failed)

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
                    log.error("the decision log cannot be written: %s", error)
                    return
                self.written += 1

    def _line(self, taken: _Taken) -> bytes:
        request, placement = taken.request, taken.placement
        line = logged_decision(
            self._core, request, placement, LOGGED_CANDIDATES, taken.at, self._clock()
        )
        return json.encode(line) + b"\n"


class _RotatedFile:
    """A file that begins anew when it is full; of what was before, the last one is kept."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd = _open(path)
        self._bytes = os.fstat(self._fd).st_size

    def write(self, line: bytes) -> None:
        """A line, whole. Raises OSError."""
        if self._bytes + len(line) > self._max_bytes and self._bytes:
            self._rotate()
        view = memoryview(line)
        while view:
            written = os.write(self._fd, view)
            self._bytes += written
            view = view[written:]

    def close(self) -> None:
        """Nothing more is written."""
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
        allowed = "a file in a folder that can be written to"
        raise ConfigError("decision_log", f"{path}: {error.strerror}", allowed) from error


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"kv_router_decision_log_{name}", text, value=value)
