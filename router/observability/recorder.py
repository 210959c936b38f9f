"""The recording of commands and decisions in files, without blocking the event loop.

    loop: entry ─▶ line of bytes ─▶ bounded queue ─▶ thread: some lines at a time ─▶ file

A line is encoded where it arises, 1 µs for a batch of 16 blocks, so that the queue is bounded in
bytes. When it is full, the newest line is dropped and counted, and the next recorded line is
preceded by a `hole`. The thread writes ten times a second, unbuffered: a killed process leaves
whole lines up to its last tenth of a second, and possibly a part of one more. What cannot be
written, as on a full disk, is tried again every second; meanwhile the queue fills.

A recording in parts keeps the newest in FILE. A full part becomes FILE.1, FILE.2, …, and the oldest
are deleted, of this recording and of former ones in the same FILE.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path

from msgspec import MsgspecError, Struct
from msgspec.structs import replace

from router.core.commands import Decision
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

log = logging.getLogger(__name__)

QUEUE_BYTES = LINE_LIMIT_BYTES
"""Limit of queued bytes, and thus of the length of a line."""

PIECE_BYTES = 1 << 18
"""Bytes written at a time; the GIL is free meanwhile."""

WRITE_INTERVAL_S = 0.1
RETRY_S = 1.0
"""The time between attempts to write while the disk is full."""

CLOSE_S = 10.0
"""Limit of the wait for a disk that does not respond."""

_ROOM_FOR_END = 256
"""Bytes reserved below a limit for the last lines of a file."""


class RecordingLimits(Struct, frozen=True):
    """Limits of a recording; 0: no limit.

    `max_records` ends it. So does `max_bytes`, unless `part_bytes` is set: then a file of that size
    is followed by the next one, and all files together stay within `max_bytes`.
    """

    max_records: int = 0
    max_bytes: int = 0
    part_bytes: int = 0


class Recorder:
    """A recorder of entries to a new file, or to several, one after the other.

    `on_end` is called when the recording ends. `renewed` returns the header of a next part, with
    the fleet. `records`, `missing`: numbers of entries taken and dropped; `decisions`: of those
    taken, decisions; `rotations`: parts begun after the first; `failure`: why the disk takes
    nothing at present, or did at the end.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        limits: RecordingLimits,
        on_end: Callable[[], None],
        *,
        renewed: Callable[[Header], Header] = lambda header: header,
        queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the file, readable by its owner only: it has prompts. Raises OSError.

        An existing file is refused, unless the recording is in parts.
        """
        self.path, self.limits = path, limits
        self._files = _Files(path, limits)
        self._header = header
        self._on_end = on_end
        self._renewed = renewed
        self._queue_bytes = queue_bytes
        self._clock = clock
        self._start_s = clock()
        self._lines: deque[bytes | None] = deque()  # None: the next part begins
        self._unwritten = memoryview(b"")
        self._taken_bytes = self._part_bytes = self.written_bytes = 0
        self._untold = 0
        self._is_over = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self.records = self.decisions = self.missing = self.rotations = 0
        self.failure: OSError | None = None
        self._put(encode_header(header))
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """The number of bytes yet to be written."""
        return self._taken_bytes - self.written_bytes

    @property
    def is_over(self) -> bool:
        """True if the recording has ended."""
        return self._is_over

    def take(self, entry: Entry) -> None:
        """Record an entry; never waits, never raises."""
        if self._is_over:
            return
        line, limits = self._encoded(entry), self.limits
        if line is None or not self._has_room(line):
            self.missing += 1
            self._untold += 1
            return
        if limits.part_bytes and self._part_bytes + len(line) + _ROOM_FOR_END > limits.part_bytes:
            self._begin_part()
        self._record_hole()
        room_bytes = limits.max_bytes - _ROOM_FOR_END - self._part_bytes
        if limits.max_bytes and len(line) > room_bytes:
            self.end("max_bytes")
            return
        self._put(line)
        self.records += 1
        self.decisions += isinstance(entry.command, Decision)
        if self.records == limits.max_records:
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
        """End the recording, and wait until all of it is on the disk, or `failure` says why not."""
        self.end("stopped")
        self._thread.join(CLOSE_S)

    def _has_room(self, line: bytes) -> bool:
        part_bytes = self.limits.part_bytes
        fits = not part_bytes or len(line) + _ROOM_FOR_END <= part_bytes
        return fits and self.waiting_bytes + len(line) <= self._queue_bytes

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

    def _begin_part(self) -> None:
        header, before = self._header, self.records + self.missing - self._untold
        self._header = self._renewed(replace(header, part=header.part + 1, before=before))
        self._lines.append(None)
        self._part_bytes = 0
        self.rotations += 1
        self._put(encode_header(self._header))

    def _record_hole(self) -> None:
        if self._untold:
            log.error(
                "%d records dropped: they arrived faster than they were written", self._untold
            )
            self._put(self._line(Hole(self._untold)))
            self._untold = 0

    def _put(self, line: bytes) -> None:
        self._taken_bytes += len(line)
        self._part_bytes += len(line)
        self._lines.append(line)

    # ── On the thread ────────────────────────────────────────────────────────────────────────────

    def _write_all(self) -> None:
        while not self._closing.wait(RETRY_S if self.failure else WRITE_INTERVAL_S):
            self._try_to_write()
        self._try_to_write()
        self._files.close()

    def _try_to_write(self) -> None:
        try:
            self._write_waiting()
        except OSError as error:
            if self.failure is None:
                log.error("the recording cannot be written, and is tried again: %s", error)
            self.failure = error
        else:
            if self.failure is not None:
                log.warning("the recording is written again")
            self.failure = None

    def _write_waiting(self) -> None:
        while self._unwritten or self._lines:
            while self._unwritten:
                written = self._files.write(self._unwritten)
                self.written_bytes += written
                self._unwritten = self._unwritten[written:]
            if self._lines and self._lines[0] is None:
                self._files.turn()
                self._lines.popleft()
            self._unwritten = memoryview(self._next_piece())

    def _next_piece(self) -> bytes:
        """Return queued lines of one part, joined to a piece of limited size."""
        piece: list[bytes] = []
        size, lines = 0, self._lines
        while size < PIECE_BYTES and lines and (line := lines[0]) is not None:
            piece.append(line)
            size += len(line)
            lines.popleft()
        return b"".join(piece)


class _Files:
    """The file that is written, and the full ones beside it.

    Everything raises OSError, after which the same call can be tried again.
    """

    def __init__(self, path: Path, limits: RecordingLimits) -> None:
        """Create the file."""
        self._path, self._limits = path, limits
        self._number = max(map(number_of, parts_of(path)), default=0) + 1
        if limits.part_bytes:
            self._retire()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._delete_oldest()

    def write(self, piece: memoryview) -> int:
        """Write a part of a piece; return its size."""
        return os.write(self._fd, piece)

    def turn(self) -> None:
        """Continue in a new file; rename the full one, and delete the oldest."""
        path = self._path.with_name(f"{self._path.name}.next")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._retire()
            path.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd
        self._delete_oldest()

    def close(self) -> None:
        """Close the file, once it is on the disk."""
        with suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)

    def _retire(self) -> None:
        with suppress(FileNotFoundError):  # there is none, or a former attempt came as far as this
            self._path.rename(self._path.with_name(f"{self._path.name}.{self._number}"))
            self._number += 1

    def _delete_oldest(self) -> None:
        if not self._limits.part_bytes:
            return
        parts = sorted(parts_of(self._path), key=number_of)
        sizes = [each.stat().st_size for each in parts]
        room_bytes = self._limits.max_bytes - self._limits.part_bytes
        while parts and sum(sizes) > room_bytes:
            parts.pop(0).unlink(missing_ok=True)
            sizes.pop(0)


def parts_of(path: Path) -> list[Path]:
    """Return the full parts beside the newest part, in no order."""
    return [each for each in path.parent.glob(f"{escape(path.name)}.*") if number_of(each)]


def number_of(part: Path) -> int:
    """Return the number at the end of a part's name; 0 if it has none."""
    suffix = part.suffix[1:]
    return int(suffix) if suffix.isdecimal() else 0
