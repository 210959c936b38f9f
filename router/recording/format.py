"""The form of a recording: lines of JSON, first a header, then an entry each.

    {"at_s": 0.25, "entry": {"kind": "tick", "now_s": 7.5}}

An entry contains the fields of its command, the time if the command depends on it, and the outcome
of a decision.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import numpy as np
from msgspec import Raw, Struct, ValidationError, json

from router.core.commands import Admit, AnyCommand, Decision, UpsertWorker
from router.errors import KvRouterError
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import U64, U64_MAX, UNREADABLE
from router.recording.entries import NO_RESULT, Entry, RecordedResult

RecordingProblem: TypeAlias = Literal[
    "empty", "foreign", "version", "damaged", "cut off", "too long"
]


class RecordingError(KvRouterError):
    """A recording that is unreadable, at least from some line on. `problem`: the kind of damage."""

    code = "recording"

    def __init__(self, problem: RecordingProblem, line: int, detail: str) -> None:
        super().__init__(f"line {line}: {detail}")
        self.problem = problem
        self.line = line
        self.detail = detail


FORMAT = "kv-router recording"
VERSION = 2

_START = b'{"format":"%s",' % FORMAT.encode()

LINE_LIMIT_BYTES = 64 << 20
"""The limit of a line. The longest are ranks of snapshots, 11 bytes for each of their blocks."""

Setting: TypeAlias = bool | int | float | str | None


class Header(Struct, frozen=True, kw_only=True):
    """The inputs that a core needs to decide the same.

    `settings`: those that decisions depend on, by their names in the configuration. `multiplier`:
    the hash multiplier of the index, which affects decisions when the index is nearly full.
    `recorded_at`: UTC, for human readers.

    A recording may be in several files. `part`: the number of this one, from 1; `before`: the
    entries of the parts before it; `is_midway`: the router ran before its first part. `workers`:
    the fleet at `now_s`, when this part began, if its first entry meets a router with one.
    """

    format: str = FORMAT
    version: int = VERSION
    product_version: str
    recorded_at: str
    settings: dict[str, Setting]
    seed: int
    multiplier: U64
    part: int = 1
    before: int = 0
    is_midway: bool = False
    now_s: float = 0.0
    workers: tuple[WorkerAnnouncement, ...] = ()

    def __post_init__(self) -> None:
        if not self.multiplier % 2 or self.multiplier > U64_MAX:
            raise ValueError(f"Expected an odd `int` <= {U64_MAX} - at `$.multiplier`")


Cause: TypeAlias = Literal["overload", "rotated", "midway"]
"""Why entries are missing.

They came faster than they could be written; their part was deleted, of older ones first; or the
recording began in a running router.
"""


class Hole(Struct, frozen=True, tag_field="kind", tag="hole", omit_defaults=True):
    """A gap of `missing` entries; of those before a recording, their number is unknown: 0."""

    missing: int
    cause: Cause = "overload"


class End(Struct, frozen=True, tag_field="kind", tag="end"):
    """The regular end of a recording: no entry before it is missing except in holes."""

    reason: str


class Line(Struct, frozen=True):
    """A line of a recording. `at_s`: seconds since the start of the recording."""

    at_s: float
    entry: Entry | Hole | End


class _RawLine(Struct, frozen=True):
    at_s: float
    entry: Raw


class _Moment(Struct, frozen=True, omit_defaults=True):
    """The fields of an entry beside those of its command."""

    now_s: float | None = None
    outcome: RecordedResult | None = None
    request_id: str | None = None
    isl_tokens: int = 0


class _Marked(Struct, frozen=True):
    """The format and version of a file, checked before the other fields of the header."""

    format: str
    version: int


def _listed(value: object) -> object:
    """Return an array of tokens, in which binary requests arrive, as a list."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be recorded")


_encoder = json.Encoder(enc_hook=_listed)
_marked_decoder = json.Decoder(_Marked)
_header_decoder = json.Decoder(Header)
_line_decoder = json.Decoder(_RawLine)
_entry_decoder: json.Decoder[AnyCommand | Hole | End] = json.Decoder(AnyCommand | Hole | End)
_moment_decoder = json.Decoder(_Moment)


def opening(header: Header) -> Iterator[Line]:
    """Yield what stands for the state at the start of a part, if no part before it is at hand.

    That is a gap, and the fleet. Nothing before the first part of a router that was empty.
    """
    if header.part == 1 and not header.is_midway:
        return
    cause: Cause = "midway" if header.part == 1 else "rotated"
    yield Line(0.0, Hole(header.before, cause))
    for announcement in header.workers:
        yield Line(0.0, Entry(UpsertWorker(announcement), header.now_s))


def encode_header(header: Header) -> bytes:
    """Return the first line."""
    return _encoder.encode(header) + b"\n"


def encode_line(line: Line) -> bytes:
    """Return a further line. O(bytes)."""
    entry = line.entry
    if isinstance(entry, Entry):
        fields = _encoder.encode(entry.command)
        now_s = entry.now_s if entry.command.has_time else None
        outcome = None if entry.outcome == NO_RESULT else entry.outcome
        moment = _Moment(now_s, outcome, entry.request_id, entry.isl_tokens)
        beside = _encoder.encode(moment)
        encoded = fields if beside == b"{}" else fields[:-1] + b"," + beside[1:]
        return _encoder.encode(_RawLine(line.at_s, Raw(encoded))) + b"\n"
    return _encoder.encode(line) + b"\n"


def decode_header(raw: bytes) -> Header:
    """Return the header in the first line. Raises RecordingError."""
    if not raw:
        raise RecordingError("empty", 1, "the file is empty")
    try:
        marked = _marked_decoder.decode(raw)
    except UNREADABLE as error:
        raise _no_header(raw) from error
    if marked.format != FORMAT:
        raise RecordingError("foreign", 1, f"format {marked.format!r} (allowed: {FORMAT!r})")
    if marked.version != VERSION:
        reads = f"this kv-router reads version {VERSION}"
        raise RecordingError("version", 1, f"a recording of version {marked.version}; {reads}")
    try:
        return _header_decoder.decode(raw)
    except UNREADABLE as error:
        raise RecordingError("damaged", 1, str(error)) from error


def decode_lines(lines: Iterable[bytes], first: int = 2) -> Iterator[tuple[int, Line]]:
    """Yield the lines after a header, with their numbers, from `first` on.

    Raises RecordingError if a line is unreadable: `cut off` if it is the unfinished last one.
    """
    for number, raw in enumerate(lines, start=first):
        try:
            yield number, _decode_line(raw)
        except UNREADABLE as error:
            if len(raw) >= LINE_LIMIT_BYTES:
                reason = f"longer than {LINE_LIMIT_BYTES} bytes"
                raise RecordingError("too long", number, reason) from error
            if not raw.endswith(b"\n"):
                raise RecordingError("cut off", number, "the file ends within this line") from error
            raise RecordingError("damaged", number, str(error)) from error


def _decode_line(raw: bytes) -> Line:
    line = _line_decoder.decode(raw)
    entry = _entry_decoder.decode(line.entry)
    if isinstance(entry, Hole | End):
        return Line(line.at_s, entry)
    if not entry.has_time:
        return Line(line.at_s, Entry(entry))
    moment = _moment_decoder.decode(line.entry)
    if moment.now_s is None:
        raise ValidationError("Object missing required field `now_s`")
    if not isinstance(entry, Decision):
        return Line(line.at_s, Entry(entry, moment.now_s))
    if moment.outcome is None and not isinstance(entry, Admit):
        raise ValidationError("Object missing required field `outcome`")
    told = (moment.outcome or NO_RESULT, moment.request_id, moment.isl_tokens)
    return Line(line.at_s, Entry(entry, moment.now_s, *told))


def _no_header(raw: bytes) -> RecordingError:
    is_start = raw.startswith(_START) or _START.startswith(raw)
    if is_start and not raw.endswith(b"\n"):
        return RecordingError("cut off", 1, "the file ends within its header")
    return RecordingError("foreign", 1, "the file does not begin like a recording")
