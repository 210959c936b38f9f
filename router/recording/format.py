"""The bytes of a recording: lines of JSON, the first of them a header.

    {"format": "kv-router recording", "version": 2, … settings, seeds}
    {"at_s": 1.25, "entry": {"kind": "tick", "now_s": 81234.5}}
    {"at_s": 9.75, "entry": {"kind": "end", "reason": "stopped"}}

Bytes within (packed hashes, load reports) are base64. A line stands for itself: whatever becomes of
the file behind it, it can be read.
"""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
from msgspec import DecodeError, Struct, json

from router.recording.commands import Command, Entry
from router.recording.decisions import Decision
from router.recording.errors import RecordingError

FORMAT = "kv-router recording"
VERSION = 2

_START = b'{"format":"%s",' % FORMAT.encode()

LINE_LIMIT_BYTES = 64 << 20
"""No line is longer; the longest are ranks of snapshots, 11 bytes for each of their blocks."""

Setting: TypeAlias = bool | int | float | str | None


class Header(Struct, frozen=True, kw_only=True):
    """What a core has to be made of to decide the same.

    `settings`: those that decisions depend on, by their names in the configuration. `multiplier`:
    how the index spreads its keys, which shows when it is nearly full. `recorded_at`: UTC, for
    people.
    """

    format: str = FORMAT
    version: int = VERSION
    product_version: str
    recorded_at: str
    settings: dict[str, Setting]
    seed: int
    multiplier: int


class Hole(Entry, frozen=True, tag="hole"):
    """So many entries are missing here: they came faster than they could be written."""

    missing: int


class End(Entry, frozen=True, tag="end"):
    """The recording was ended here: nothing that came before is missing."""

    reason: str


class Line(Struct, frozen=True):
    """`at_s`: when, since the start of the recording."""

    at_s: float
    entry: Command | Decision | Hole | End


class _Marked(Struct, frozen=True):
    """What is looked at before anything else: whose file this is."""

    format: str
    version: int


def _listed(value: object) -> object:
    """Tokens of a request that came over the wire are an array."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is nothing to be recorded")


_encoder = json.Encoder(enc_hook=_listed)
_marked_decoder = json.Decoder(_Marked)
_header_decoder = json.Decoder(Header)
_line_decoder = json.Decoder(Line)


def encode_header(header: Header) -> bytes:
    """The first line."""
    return _encoder.encode(header) + b"\n"


def encode_line(line: Line) -> bytes:
    """A further line. O(bytes)."""
    return _encoder.encode(line) + b"\n"


def decode_header(raw: bytes) -> Header:
    """What the first line says. Raises RecordingError."""
    if not raw:
        raise RecordingError("empty", 1, "the file is empty")
    try:
        marked = _marked_decoder.decode(raw)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_header(raw) from error
    if marked.format != FORMAT:
        raise RecordingError("foreign", 1, f"format {marked.format!r} (allowed: {FORMAT!r})")
    if marked.version != VERSION:
        reads = f"this kv-router reads version {VERSION}"
        raise RecordingError("version", 1, f"a recording of version {marked.version}; {reads}")
    try:
        return _header_decoder.decode(raw)
    except (DecodeError, UnicodeDecodeError) as error:
        raise RecordingError("damaged", 1, str(error)) from error


def decode_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, Line]]:
    """The lines behind the header, with their numbers in the file.

    Raises RecordingError where one cannot be read: `cut off` if it is the unfinished last one.
    """
    for number, raw in enumerate(lines, start=2):
        try:
            yield number, _line_decoder.decode(raw)
        except (DecodeError, UnicodeDecodeError, RecursionError) as error:
            if len(raw) >= LINE_LIMIT_BYTES:
                reason = f"longer than {LINE_LIMIT_BYTES} bytes"
                raise RecordingError("too long", number, reason) from error
            if not raw.endswith(b"\n"):
                raise RecordingError("cut off", number, "the file ends within this line") from error
            raise RecordingError("damaged", number, str(error)) from error


def _no_header(raw: bytes) -> RecordingError:
    is_start = raw.startswith(_START) or _START.startswith(raw)
    if is_start and not raw.endswith(b"\n"):
        return RecordingError("cut off", 1, "the file ends within its header")
    return RecordingError("foreign", 1, "the file does not begin like a recording")
