"""Heads of answers that came before: a server that says the same again, but for the length of the
body and the request's id, is not parsed again.
"""

from msgspec import Struct

from router.known_heads import KnownHeads

MOST_HEADS = 16
"""Of one server."""

_ID = b"x-request-id"


class Head(Struct, frozen=True):
    """Of an answer; headers are named in lower case."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]

    def with_id(self, request_id: bytes) -> "Head":
        """The same head, which says an id, of another answer."""
        pairs = [(_ID, request_id) if pair[0] == _ID else pair for pair in self.headers]
        return Head(self.status, tuple(pairs))


class KnownAnswers:
    """Heads of whole answers after which their connection could be used again."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: KnownHeads[Head] = KnownHeads(MOST_HEADS)

    def find(self, data: bytes) -> tuple[Head, bytes] | None:
        """Head and body, if these bytes are an answer whose head is known, and all of it."""
        found = self._heads.find(data)
        if found is None:
            return None
        head, request_id, body = found
        return head.with_id(request_id) if request_id else head, body

    def remember(self, data: bytes, head: Head) -> None:
        """These bytes were parsed as one answer, and nothing else, with this head."""
        said = [value for name, value in head.headers if name == _ID]
        if len(said) < 2:
            self._heads.remember(data, head, said[0] if said else b"")
