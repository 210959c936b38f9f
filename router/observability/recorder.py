"""A recorder of commands and decisions to a file, which never blocks the event loop.

    loop: entry ─▶ line of bytes ─▶ bounded queue ─▶ thread: some lines at a time ─▶ file

A line is encoded where it arises, 1 µs for a batch of 16 blocks, so that the queue is bounded in
bytes. When it is full, the newest line is dropped and counted, and the next recorded line is
preceded by a `hole`. The thread writes ten times a second, unbuffered: a killed process leaves
whole lines up to its last tenth of a second, and possibly a part of one more.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import MsgspecError, Struct

from router.errors import ConfigError
from router.recording.entries import Entry
from router.recording.format import (
    LINE_LIMIT_BYTES,
    End,
    Header,
    Hole,
    Line,
    encode_header,
    encode_line,
)
from router.runtime.process.metrics import Rows, counter, gauge

log = logging.getLogger(__name__)

QUEUE_BYTES = LINE_LIMIT_BYTES
"""Limit of queued bytes, and thus of the length of a line."""

PIECE_BYTES = 1 << 18
"""Bytes written at a time; the GIL is free meanwhile."""

WRITE_INTERVAL_S = 0.1

_ROOM_FOR_END = 256
"""Bytes reserved below the limit for the last lines of a recording."""


class RecordingLimits(Struct, frozen=True):
    """Limits that end a recording; 0: no limit."""

    max_records: int = 0
    max_bytes: int = 0


class Recorder:
    """A recorder of entries to a new file.

    `on_end` is called, on any thread, when recording ends: a limit was reached, or the file cannot
    be written (`failure`). `records`, `missing`: numbers of entries written and dropped.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        limits: RecordingLimits,
        on_end: Callable[[], None],
        *,
        queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the file, readable by its owner only: it has prompts. Raises ConfigError."""
        self._fd = _create(path)
        self._limits = limits
        self._on_end = on_end
        self._queue_bytes = queue_bytes
        self._clock = clock
        self._start_s = clock()
        self._lines: deque[bytes] = deque()
        self._taken_bytes = self._written_bytes = 0
        self._untold = 0
        self._is_over = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self.records = 0
        self.missing = 0
        self.failure: OSError | None = None
        self._put(encode_header(header))
        self._thread.start()

    @property
    def written_bytes(self) -> int:
        """The size of the file."""
        return self._written_bytes

    @property
    def waiting_bytes(self) -> int:
        """The number of bytes yet to be written."""
        return self._taken_bytes - self._written_bytes

    def take(self, entry: Entry) -> None:
        """Record an entry; never waits, never raises."""
        if self._is_over:
            return
        line = self._encoded(entry)
        if line is None or self.waiting_bytes + len(line) > self._queue_bytes:
            self.missing += 1
            self._untold += 1
            return
        self._record_hole()
        room_bytes = self._limits.max_bytes - _ROOM_FOR_END - self._taken_bytes
        if self._limits.max_bytes and len(line) > room_bytes:
            self.end("max_bytes")
            return
        self._put(line)
        self.records += 1
        if self.records == self._limits.max_records:
            self.end("max_records")

    def end(self, reason: str) -> None:
        """End the recording with a reason; further calls have no effect."""
        if self._is_over:
            return
        self._record_hole()
        self._put(self._line(End(reason)))
        self._is_over = True
        self._closing.set()
        self._on_end()

    def close(self) -> None:
        """End the recording, and wait until all of it is on the disk."""
        self.end("stopped")
        self._thread.join()

    def _encoded(self, entry: Entry) -> bytes | None:
        """Return the entry's line.

        Returns None if it cannot be encoded, such as a name that is not text, or a number that is
        too large.
        """
        try:
            return self._line(entry)
        except (MsgspecError, ValueError, OverflowError, TypeError) as error:
            log.error("%s cannot be recorded: %s", type(entry.command).__name__, error)
            return None

    def _line(self, entry: Entry | Hole | End) -> bytes:
        return encode_line(Line(round(self._clock() - self._start_s, 6), entry))

    def _record_hole(self) -> None:
        if self._untold:
            log.error(
                "%d records dropped: they arrived faster than they were written", self._untold
            )
            self._put(self._line(Hole(self._untold)))
            self._untold = 0

    def _put(self, line: bytes) -> None:
        self._taken_bytes += len(line)
        self._lines.append(line)

    def _write_all(self) -> None:
        try:
            while not self._closing.wait(WRITE_INTERVAL_S):
                self._write_waiting()
            self._write_waiting()
            os.fsync(self._fd)
        except OSError as error:
            self.failure = error
            self._is_over = True
            self._on_end()
        finally:
            os.close(self._fd)

    def _write_waiting(self) -> None:
        for piece in _pieces(self._lines):
            view = memoryview(piece)
            while view:
                written = os.write(self._fd, view)
                self._written_bytes += written
                view = view[written:]


RECORDER_METRICS: Rows = {
    "recorded": counter("Commands and decisions recorded", "records"),
    "recorded_bytes": counter("Size of the recording", "written_bytes"),
    "recording_missing": counter("Records dropped: the queue was full", "missing"),
    "recording_waiting_bytes": gauge("Bytes not yet written", "waiting_bytes"),
}


def _create(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        allowed = "a new file in a writable folder"
        raise ConfigError("output", f"{path}: {error.strerror}", allowed) from error


def _pieces(lines: deque[bytes]) -> Iterator[bytes]:
    """Yield all queued lines, joined to pieces of limited size."""
    while lines:
        piece, size = [], 0
        while lines and size < PIECE_BYTES:
            piece.append(lines.popleft())
            size += len(piece[-1])
        yield b"".join(piece)
