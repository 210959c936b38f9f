"""Heads of hot requests that came before: whoever asks again in the same words, but for the length
of the body and the request's id, is not parsed again.
"""

from typing import TypeAlias

from router.http.exchange import Head
from router.http.hot import HotRoute
from router.known_heads import KnownHeads

MOST_HEADS = 1024

Found: TypeAlias = tuple[HotRoute, Head, bytes]


class KnownRequests:
    """Plain heads and their routes."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: KnownHeads[tuple[HotRoute, Head]] = KnownHeads(MOST_HEADS)

    def find(self, data: bytes) -> Found | None:
        """Route, head and body of a request, if its head is known and these bytes are all of it."""
        found = self._heads.find(data)
        if found is None:
            return None
        (route, head), request_id, body = found
        return route, head.with_id(request_id.decode("ascii")) if request_id else head, body

    def remember(self, data: bytes, route: HotRoute, head: Head) -> None:
        """These bytes were parsed as one request, and nothing else, to this route and head."""
        if head.is_plain:
            self._heads.remember(data, (route, head), (head.plain_id or "").encode())
