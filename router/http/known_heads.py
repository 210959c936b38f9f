"""Heads of requests that came before: whoever asks again in the same words is not parsed again.

    POST /select HTTP/1.1␍␊host: x␍␊x-request-id: 7f3a␍␊content-length: 3071␍␊␍␊[the body]
    ├────────────── known ──────────────────────┤    ├────── known ────┤    ├─┤

The parser has taken these very bytes before, on their own and as the beginning of a message; only
the number differs that says how long the body is, and the id of the request where one is said. So
it would take them again, and alike.
"""

from typing import TypeAlias

from msgspec import Struct

from router.http.exchange import Head, fit_id
from router.http.hot import HotRoute
from router.message_lengths import HEAD_END, LENGTHS, body_behind, says

MOST_HEADS = 1024
MOST_BYTES = 1024
"""Of a head that is remembered."""

_MOST_VALUE = 256
_IDS = (b"\r\nx-request-id: ", b"\r\nX-Request-Id: ")

Found: TypeAlias = tuple[HotRoute, Head, bytes]


class _Known(Struct, frozen=True):
    """A head's bytes before, between and behind its values, of which it has one or two: the length
    and, `id_at`, the id; -1 where it says none.
    """

    pieces: tuple[bytes, ...]
    id_at: int
    route: HotRoute
    head: Head

    def found_in(self, data: bytes) -> Found | None:
        """Route, head and body, if these bytes are this head with other values, and its body."""
        if self.id_at >= 0:
            return self._found_with_id(data)
        body = body_behind(data, *self.pieces)  # twice as fast
        return None if body is None else (self.route, self.head, body)

    def _found_with_id(self, data: bytes) -> Found | None:
        if not data.startswith(self.pieces[0]):
            return None
        at, values = len(self.pieces[0]), []
        for piece in self.pieces[1:]:
            stop = data.find(b"\r", at, at + _MOST_VALUE + 1)
            if stop < 0 or not data.startswith(piece, stop):
                return None
            values.append(data[at:stop])
            at = stop + len(piece)
        plain_id = fit_id(values[self.id_at])
        if plain_id is None or not says(values[1 - self.id_at], len(data) - at):
            return None
        return self.route, self.head.with_id(plain_id), data[at:]


class KnownHeads:
    """Heads without a word about the single request but its id, by their bytes but their values."""

    __slots__ = ("_known", "_last")

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, ...], _Known] = {}
        self._last: _Known | None = None

    def find(self, data: bytes) -> Found | None:
        """Route, head and body of a request, if its head is known and these bytes are all of it.

        The head that was found last is tried first, which takes half as long.
        """
        if self._last is not None and (found := self._last.found_in(data)) is not None:
            return found
        known = self._known.get(_pieces(data))
        if known is None:
            return None
        self._last = known
        return known.found_in(data)

    def remember(self, data: bytes, route: HotRoute, head: Head) -> None:
        """These bytes were parsed as one request, and nothing else, to this route and head."""
        pieces = _pieces(data)
        if len(pieces) < 2 or not head.is_plain:
            return
        starts = [number for number, each in enumerate(pieces) if each.endswith(_IDS)]
        known = _Known(pieces, starts[0] if starts else -1, route, head)
        if known.found_in(data) != (route, head, data[data.find(HEAD_END) + len(HEAD_END) :]):
            return
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
        self._known[pieces] = known


def _pieces(data: bytes) -> tuple[bytes, ...]:
    """A head, cut where its values are; empty unless it is a short one that tells a length."""
    end = data.find(HEAD_END, 0, MOST_BYTES)
    length = _value(data, LENGTHS, end)
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
