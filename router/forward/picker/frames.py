"""The frames of HTTP/2, as bytes. Sources: RFC 9113, section 6; RFC 7541, section 6."""

from struct import Struct as Layout

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
"""Types of frames."""

ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITIZED = 0x4, 0x8, 0x20
"""Flags."""

HEADER_TABLE_SIZE, ENABLE_PUSH, MOST_STREAMS, INITIAL_WINDOW, FRAME, HEAD_LIST = range(1, 7)
"""Settings."""

NO_ERROR, PROTOCOL, FLOW_CONTROL, STREAM_CLOSED, FRAME_SIZE = 0, 1, 3, 5, 6
COMPRESSION, CALM = 9, 11
"""Codes of errors."""

HEAD = Layout(">HBBBL")
"""The head of a frame: its length in two parts, type, flags, stream."""
SETTING = Layout(">HL")
PRIORITY_BYTES, NUMBER_BYTES, PING_BYTES = 5, 4, 8

DEFAULT_WINDOW_BYTES = 65_535
MOST_WINDOW_BYTES = 2**31 - 1
LEAST_FRAME_BYTES, LARGEST_FRAME_BYTES = 1 << 14, (1 << 24) - 1

STATUS_200 = b"\x88"
"""`:status: 200` in a block of headers."""
NO_TABLE = b"\x20"
"""Empties the receiver's table of headers, at the begin of a block."""


class Http2Error(Exception):
    """A violation of the protocol, or of a limit, that ends the connection. `code`: of RFC 9113."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """Return a frame. `number`: of its stream; 0: of the connection."""
    size_bytes = len(payload)
    return HEAD.pack(size_bytes >> 8, size_bytes & 0xFF, kind, flags, number) + payload


def window(number: int, more_bytes: int) -> bytes:
    """Return the frame that lets a sender send more."""
    return frame(WINDOW, 0, number, more_bytes.to_bytes(NUMBER_BYTES, "big"))


def unpadded(payload: bytes) -> bytes:
    """Return a payload without its padding. Raises Http2Error."""
    if not payload or payload[0] >= len(payload):
        raise Http2Error(PROTOCOL, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header of a block, in no table. Name and value are shorter than 127 bytes."""
    return b"\0%c%b%c%b" % (len(name), name, len(value), value)
