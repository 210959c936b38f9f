"""Heads of requests that came before: whoever asks again in the same words is not parsed again.

    POST /select HTTP/1.1␍␊host: x␍␊content-length: 3071␍␊␍␊[the body]
    ├──────────────── known ─────────────────────┤    ├─┤

The parser has taken these very bytes before, on their own and as the beginning of a message; only
the number differs that says how long the body is. So it would take them again, and alike.
"""

from typing import TypeAlias

from router.http.exchange import Head
from router.http.hot import HotRoute

MOST_HEADS = 1024
MOST_BYTES = 1024
"""Of a head that is remembered."""

_MOST_DIGITS = 9
_END = b"\r\n\r\n"
_LENGTHS = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")

Known: TypeAlias = tuple[HotRoute, Head]


class KnownHeads:
    """Heads without a word about the single request, by all of their bytes but the length."""

    __slots__ = ("_known", "_last")

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}
        self._last: tuple[bytes, bytes, Known] | None = None

    def find(self, data: bytes) -> tuple[HotRoute, Head, bytes] | None:
        """Route, head and body of a request, if its head is known and these bytes are all of it.

        The head that was found last is tried first, which takes half as long.
        """
        if self._last is not None:
            start, rest, (route, head) = self._last
            if data.startswith(start):
                stop = data.find(b"\r", len(start), len(start) + _MOST_DIGITS + 1)
                digits, end = data[len(start) : stop], stop + len(rest)
                if stop > 0 and data.startswith(rest, stop) and _is(digits, len(data) - end):
                    return route, head, data[end:]
        parts = _parted(data)
        if parts is None:
            return None
        start, rest, body = parts
        known = self._known.get(start + rest)
        if known is None:
            return None
        self._last = (start, rest, known)
        return (*known, body)

    def remember(self, data: bytes, route: HotRoute, head: Head) -> None:
        """These bytes were parsed as one request, and nothing else, to this route and head."""
        parts = _parted(data)
        if parts is None or not head.is_plain:
            return
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
        self._known[parts[0] + parts[1]] = (route, head)


def _parted(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The head before and behind the length it tells, and the body; None unless that is so long."""
    end = data.find(_END, 0, MOST_BYTES)
    for length in _LENGTHS:
        at = data.find(length, 0, end)
        if end > 0 and at > 0:
            break
    else:
        return None
    start = at + len(length)
    stop = data.find(b"\r", start, end + 1)
    digits = data[start:stop]
    end += len(_END)
    if not _is(digits, len(data) - end):
        return None
    return data[:start], data[stop:end], data[end:]


def _is(digits: bytes, number: int) -> bool:
    return digits.isdigit() and len(digits) <= _MOST_DIGITS and int(digits) == number
