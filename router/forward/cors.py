"""Requests from pages of other origins (CORS): those of the named origins, and none by default.

A browser asks before it sends most of them (a preflight), without the caller's token. The answer is
therefore the same for every path, and given before authentication. Credentials of the browser
(cookies) are never allowed: a page sends its token itself.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from router.forward.headers import (
    ATTEMPTS,
    CACHED_TOKENS,
    DP_RANK,
    DROPPED_FIELDS,
    PREFILL_CACHED_TOKENS,
    PREFILL_PREDICTED_TOKENS,
    PREFILL_WORKER_ID,
    REQUEST_ID,
    WORKER_ID,
    Pairs,
)
from router.runtime.http_server.exchange import encoded_headers

MAX_AGE_S = 600
"""Time for which a browser remembers the answer to a preflight."""

_EXPOSED = (
    ATTEMPTS,
    CACHED_TOKENS,
    DP_RANK,
    DROPPED_FIELDS,
    PREFILL_CACHED_TOKENS,
    PREFILL_PREDICTED_TOKENS,
    PREFILL_WORKER_ID,
    REQUEST_ID,
    WORKER_ID,
    b"retry-after",
)
_NAMES = re.compile(
    rb"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}(?:, ?[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}){0,63}"
)
"""Names of headers, as a preflight lists them."""

_VARY = (b"vary", b"Origin")


class Cors:
    """The headers of responses by origin. Without origins, no response has any of them."""

    __slots__ = ("_headers", "_lines", "_other", "_other_lines")

    def __init__(self, origins: frozenset[bytes]) -> None:
        exposed = (b"access-control-expose-headers", b", ".join(_EXPOSED))
        self._headers: Mapping[bytes | None, Pairs] = MappingProxyType(
            {each: (_VARY, (b"access-control-allow-origin", each), exposed) for each in origins}
        )
        self._lines = {each: encoded_headers(pairs) for each, pairs in self._headers.items()}
        self._other: Pairs = (_VARY,) if origins else ()
        self._other_lines = encoded_headers(self._other)

    def headers(self, origin: bytes | None) -> Pairs:
        """Return the headers of a response to a request of this origin."""
        return self._headers.get(origin, self._other)

    def lines(self, origin: bytes | None) -> bytes:
        """Return `headers`, encoded."""
        return self._lines.get(origin, self._other_lines)

    def preflight(self, method: str, headers: Pairs) -> Pairs | None:
        """Return the headers that answer a preflight of a named origin.

        Returns None for any other request, which is served or refused as usual.
        """
        if method != "OPTIONS" or not self._headers:
            return None
        found = dict(headers)
        allowed = self._headers.get(found.get(b"origin"))
        if allowed is None or b"access-control-request-method" not in found:
            return None
        names = found.get(b"access-control-request-headers", b"")
        wanted = ((b"access-control-allow-headers", names),) if _NAMES.fullmatch(names) else ()
        return (
            *allowed[:2],
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            *wanted,
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        )
