"""Requests to select that ask for a rank only, in words that came before.

    {"token_ids": […], "model_name": "m"}   ─▶ the tokens, and what the words say, as it was decoded
    ├──── words ────┤└┤├──── words ──────┤

Whatever is not plainly that is read the general way (`token_requests.py`), and then known.
"""

import numpy as np

from router.http.exchange import BINARY, JSON, Head
from router.http.header_mode import ASKED
from router.http.token_requests import TokenRequests
from router.plain import PlainRequest, plain_request
from router.process.bodies import THREAD_BYTES
from router.protocol.requests import SelectRequest
from router.sequence.hashing import TokenArray
from router.token_bodies import MOST_REMEMBERED, TOKEN_BYTES, Remembered


class _PlainWords:
    """What is plain of that which was said before."""

    __slots__ = ("_plain", "_said")

    def __init__(self, said: Remembered[SelectRequest]) -> None:
        self._said = said
        self._plain: dict[bytes, PlainRequest | None] = {}

    def find(self, words: bytes) -> PlainRequest | None:
        """None for words that are not plain, or came never before."""
        try:
            return self._plain[words]
        except KeyError:
            return self._first(words)

    def _first(self, words: bytes) -> PlainRequest | None:
        known = self._said.find(words)
        if known is None:
            return None
        request, unknown = known
        if len(self._plain) >= MOST_REMEMBERED:
            self._plain.clear()
        plain = self._plain[words] = None if unknown else plain_request(request)
        return plain


class PlainSelects:
    """Reads such requests, of which `requests` reads all. For one thread."""

    __slots__ = ("_json", "_queries", "_room", "_split")

    def __init__(self, requests: TokenRequests[SelectRequest]) -> None:
        self._split = requests.tokens.split
        self._room = np.empty(THREAD_BYTES // 2 + 1, np.uint32)
        self._json = _PlainWords(requests.tokens.rest)
        self._queries = _PlainWords(requests.said)

    def read(self, head: Head, body: bytes) -> tuple[PlainRequest, TokenArray] | None:
        """What is asked, and of which tokens, until the next is read; None: not that plainly.
        O(bytes).
        """
        query = head.query_string
        if query and ASKED in query:
            return None
        if head.media_type == JSON and len(body) <= THREAD_BYTES:
            found = self._split(body, self._room)
            request = None if found is None else self._json.find(found[0])
            return None if request is None or found is None else (request, found[1])
        if head.media_type == BINARY and not len(body) % TOKEN_BYTES:
            request = self._queries.find(query)
            return None if request is None else (request, np.frombuffer(body, "<u4"))
        return None
