"""Heads of HTTP messages that came before: who says the same again is not parsed again.

    POST /select HTTP/1.1␍␊host: x␍␊x-request-id: 7f3a␍␊content-length: 3071␍␊␍␊[the body]
    ├────────────── known ──────────────────────┤    ├────── known ────┤    ├─┤

A parser has taken these very bytes before, as the beginning of a message and as all of it; only the
number differs that says how long the body is, and the id of the request where one is said. So it
would take them again, and alike.
"""

import re
from typing import Generic, TypeVar

HEAD_END = b"\r\n\r\n"

MOST_BYTES = 1024
"""Of a head that is remembered."""

_LENGTHS = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_IDS = (b"\r\nx-request-id: ", b"\r\nX-Request-Id: ")
_MOST_VALUE = 256
_fit = re.compile(rb"[\x21-\x7e]{1,256}").fullmatch

T = TypeVar("T")


class _Known(Generic[T]):
    """A head's bytes before, between and behind its values, of which it has one or two: the length
    and, first or last, the id.
    """

    __slots__ = ("_is_id_first", "_pieces", "_value")

    def __init__(self, pieces: tuple[bytes, ...], value: T) -> None:
        self._pieces = pieces
        self._is_id_first = pieces[0].endswith(_IDS)
        self._value = value

    def found_in(self, data: bytes) -> tuple[T, bytes, bytes] | None:
        """What was remembered, the id, and the body, if these bytes are this head with other
        values, and its body. One function, for it is called for every message.
        """
        pieces = self._pieces
        if not data.startswith(pieces[0]):
            return None
        at = len(pieces[0])
        stop = data.find(b"\r", at, at + _MOST_VALUE + 1)
        length, request_id = data[at:stop], b""
        if stop < 0 or not data.startswith(pieces[1], stop):
            return None
        at = stop + len(pieces[1])
        if len(pieces) == 3:
            stop = data.find(b"\r", at, at + _MOST_VALUE + 1)
            request_id = data[at:stop]
            if stop < 0 or not data.startswith(pieces[2], stop):
                return None
            at = stop + len(pieces[2])
            if self._is_id_first:
                length, request_id = request_id, length
            if _fit(request_id) is None:
                return None
        if length != b"%d" % (len(data) - at):
            return None
        return self._value, request_id, data[at:]


class KnownHeads(Generic[T]):
    """Heads without a word about the single message but its length and its id, by all their other
    bytes, and what they mean; at most so many, or all are forgotten.
    """

    __slots__ = ("_known", "_last", "_most", "_other")

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[tuple[bytes, ...], _Known[T]] = {}
        self._last: _Known[T] | None = None
        self._other: _Known[T] | None = None

    def find(self, data: bytes) -> tuple[T, bytes, bytes] | None:
        """What was remembered, the message's id (b"": it says none) and its body, if its head is
        known and these bytes are all of it.

        The two heads that were found last are tried first, which takes a third as long.
        """
        last, other = self._last, self._other
        if last is not None and (found := last.found_in(data)) is not None:
            return found
        if other is not None and (found := other.found_in(data)) is not None:
            return found
        known = self._known.get(_pieces(data))
        if known is None:
            return None
        self._last, self._other = known, last
        return known.found_in(data)

    def remember(self, data: bytes, value: T, request_id: bytes = b"") -> None:
        """These bytes were parsed as one message, and nothing else, with this id (b"": none), and
        no other.
        """
        pieces = _pieces(data)
        if len(pieces) < 2:
            return
        known = _Known(pieces, value)
        found = known.found_in(data)
        if found is None or found[1] != request_id:
            return
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[pieces] = known


def _pieces(data: bytes) -> tuple[bytes, ...]:
    """A head, cut where its values are; empty unless it is a short one that tells a length."""
    end = data.find(HEAD_END, 0, MOST_BYTES)
    length = _value(data, _LENGTHS, end)
    if length is None:
        return ()
    end += len(HEAD_END)
    request_id = _value(data, _IDS, end)
    if request_id is None:
        return data[: length[0]], data[length[1] : end]
    first, second = sorted((length, request_id))
    return data[: first[0]], data[first[1] : second[0]], data[second[1] : end]


def _value(data: bytes, names: tuple[bytes, ...], end: int) -> tuple[int, int] | None:
    """Where the value of the first header of such a name begins and ends; None: there is none."""
    for name in names:
        at = data.find(name, 0, end)
        if end > 0 and at > 0:
            start = at + len(name)
            return start, data.find(b"\r", start)
    return None
