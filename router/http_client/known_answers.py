"""Heads of answers that came before: a server that says the same again is not parsed again.

    HTTP/1.1 200 OK␍␊content-type: application/json␍␊content-length: 212␍␊␍␊[the body]
    ├────────────────────────── known ─────────────────────────────┤   ├─┤

The parser has taken these very bytes before, as the beginning of an answer and as all of it; only
the number differs that says how long the body is. So it would take them again, and alike.
"""

from msgspec import Struct

from router.message_lengths import HEAD_END, LENGTHS, body_behind, says

MOST_HEADS = 256
MOST_BYTES = 1024
"""Of a head that is remembered."""


class Head(Struct, frozen=True, eq=False):
    """Of an answer; headers are named in lower case."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class KnownAnswers:
    """Heads of whole answers after which their connection could be used again, by their bytes."""

    __slots__ = ("_known", "_last")

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], Head] = {}
        self._last: tuple[bytes, bytes, Head] = (b"?", b"", Head(0, ()))

    def find(self, data: bytes) -> tuple[Head, bytes] | None:
        """Head and body, if these bytes are an answer whose head is known, and all of it.

        The head that was found last is tried first.
        """
        start, rest, head = self._last
        body = body_behind(data, start, rest)
        if body is not None:
            return head, body
        parts = _parted(data)
        known = None if parts is None else self._known.get(parts)
        if parts is None or known is None:
            return None
        self._last = (*parts, known)
        return known, data[data.find(HEAD_END) + len(HEAD_END) :]

    def remember(self, data: bytes, head: Head) -> None:
        """These bytes were parsed as one answer, and nothing else, with this head."""
        parts = _parted(data)
        if parts is None:
            return
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
        self._known[parts] = head


def _parted(data: bytes) -> tuple[bytes, bytes] | None:
    """The head before and behind the length that it tells; None unless the body is so long."""
    end = data.find(HEAD_END, 0, MOST_BYTES)
    for length in LENGTHS:
        start = data.find(length, 0, end + 1) + len(length)
        if end > 0 and start >= len(length):
            stop = data.find(b"\r", start)
            body = end + len(HEAD_END)
            is_whole = says(data[start:stop], len(data) - body)
            return (data[:start], data[stop:body]) if is_whole else None
    return None
