"""A cache of the heads of HTTP messages: a repeated head is not parsed again.

    DELETE /reservations/r17 HTTP/1.1␍␊host: x␍␊x-request-id: 7f3a␍␊content-length: 71␍␊␍␊[the body]
    ├────── known ──────┤  ├───────────── known ────────────┤    ├────── known ─────┤ ├┤

A parser has read these bytes before, as the beginning of a message. Only a few values differ: an id
in the path, the request id, the trace, and the length of the body. They consist of characters that
mean nothing to the parser, so it would read the same bytes around them the same way again.
"""

import re
from typing import Generic, TypeAlias, TypeVar

HEAD_END = b"\r\n\r\n"

MOST_BYTES = 1024
"""The limit of a head's size; longer ones are not cached."""

_KIND_BYTES, _MOST_RECENT = 14, 2
"""The first bytes of a head identify most methods and paths. Of the heads that share them, this
number is tried first on each connection."""

_PATH_ID = rb"[A-Za-z0-9._~!$&'()*+,;=:@-]{1,256}"
_VALUE = rb"[\x21-\x7e]{1,256}"
_PATH, _ID, _TRACE, _LENGTH = b"path", b"x-request-id", b"traceparent", b"content-length"
_VALUES = {_PATH: _PATH_ID, _ID: _VALUE, _TRACE: _VALUE, _LENGTH: rb"0|[1-9][0-9]{0,18}"}
_HEADER = rb"(\r\n(?i:" + b"|".join((_ID, _TRACE, _LENGTH)) + rb"): )[\x21-\x7e]+(?=\r)"
_STEP = 3
"""Between known bytes, the cut head has the beginning of its path, or the name of a header."""

T = TypeVar("T")

Found: TypeAlias = tuple[T, bytes, bytes, bytes, int, bytes]
"""A head's value, the id in its path, its request id and its trace (each b"" without one), the
length of the body, and the body so far."""

Pieces: TypeAlias = tuple[bytes | None, ...]


class _Known(Generic[T]):
    """A head's bytes around its values.

    They are one expression, because it is matched with every message: a third of the time of
    comparisons in Python. `order`: the groups of `_VALUES` in it.
    """

    __slots__ = ("match", "order", "value")

    def __init__(self, pieces: Pieces, kinds: list[bytes], value: T) -> None:
        known = [re.escape(piece or b"") for piece in pieces]
        for at, kind in zip(range(_STEP, len(known), _STEP), kinds, strict=True):
            known[at] = b"(" + _VALUES[kind] + b")" + known[at]
        missing = [kind for kind in _VALUES if kind not in kinds]
        self.match = re.compile(b"".join(known) + b"()" * len(missing)).match
        self.order = [1 + [*kinds, *missing].index(kind) for kind in _VALUES]
        self.value = value


Recent: TypeAlias = dict[bytes, list[_Known[T]]]
"""The heads that were found last on one connection, by their first bytes."""


class HeadCache(Generic[T]):
    """Values of heads that differ from message to message in the values above alone.

    `before_id`: the beginning of the paths with an id; b"" without such. If there are more than
    `most` heads, all are dropped.
    """

    __slots__ = ("_known", "_most", "_split")

    def __init__(self, most: int, before_id: bytes = b"") -> None:
        self._most = most
        self._known: dict[Pieces, _Known[T]] = {}
        before = rb"\A[A-Z]+ " + re.escape(before_id) if before_id else rb"(?!)"
        path = rb"(" + before + rb")" + _PATH_ID + rb"(?=[ /])"
        self._split = re.compile(path + rb"|" + _HEADER).split

    def find(self, data: bytes, recent: Recent[T]) -> Found[T] | None:
        """Return what a cached head says; see `Found`.

        Returns None if the head is not cached, or if bytes follow its body. `recent`: of the
        connection; its heads are tried first, which takes a third of the time.
        """
        for known in recent.get(data[:_KIND_BYTES], ()):
            match = known.match(data)
            if match is not None:
                break
        else:
            found = self._known.get(self._pieces(data))
            match = None if found is None else found.match(data)
            if found is None or match is None:
                return None
            known = found
            before = recent.get(data[:_KIND_BYTES], [])
            recent[data[:_KIND_BYTES]] = [known, *before][:_MOST_RECENT]
        path_id, request_id, trace, length = match.group(*known.order)
        end, length_bytes = match.end(), int(length) if length else 0
        body = data[end:]
        if len(body) > length_bytes or end > MOST_BYTES:
            return None
        return known.value, path_id, request_id, trace, length_bytes, body

    def remember(self, data: bytes, value: T, ids: tuple[bytes, bytes, bytes]) -> None:
        """Cache the value of a head that begins these bytes, which end with its body or before.

        `ids`: the id in the path, the request id and the trace as the parser read them; b"" without
        one. A message without a length must have no body.
        """
        pieces = self._pieces(data)
        kinds = [_kind(*pieces[at - 2 : at]) for at in range(_STEP, len(pieces), _STEP)]
        if not pieces or len(set(kinds)) < len(kinds) or _has_coding(data):
            return
        known = _Known(pieces, kinds, value)
        found = self.find(data, {data[:_KIND_BYTES]: [known]})
        if found is None or found[1:4] != ids:
            return
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[pieces] = known

    def _pieces(self, data: bytes) -> Pieces:
        """Return a head, cut at its values; empty if it is long or not whole."""
        end = data.find(HEAD_END, 0, MOST_BYTES)
        return tuple(self._split(data[: end + len(HEAD_END)])) if end >= 0 else ()


def _kind(_: bytes | None, name: bytes | None) -> bytes:
    """Return the kind of a value after the beginning of a path or the name of a header."""
    return _PATH if name is None else name.strip(b"\r\n: ").lower()


def _has_coding(data: bytes) -> bool:
    return b"transfer-encoding" in data[: data.find(HEAD_END)].lower()
