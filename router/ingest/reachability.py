"""Whether the HTTP servers of engines answer, for workers with event sockets that never did.

Such a worker may still serve requests, placed without knowledge of its cache. One that answers
nowhere is most likely a mistake in its registration, and requests sent to it would fail.
"""

import asyncio
import ssl
from collections.abc import Collection, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

TIMEOUT_S = 1.0
AGAIN_S = 5.0
"""The interval of requests to the same server."""
AT_ONCE = 64
"""Concurrent requests, to any servers."""


class Reachability:
    """The last result for each server, by worker id."""

    __slots__ = ("_answers", "_asked_s", "_limit")

    def __init__(self) -> None:
        self._answers: dict[int, bool] = {}
        self._asked_s: dict[int, float] = {}
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def answering(self, endpoints: Mapping[int, str], now_s: float) -> Collection[int]:
        """Return the workers with servers that answer; others are forgotten. O(workers)."""
        self._answers = {i: each for i, each in self._answers.items() if i in endpoints}
        self._asked_s = {i: each for i, each in self._asked_s.items() if i in endpoints}
        due = [i for i in endpoints if now_s >= self._asked_s.get(i, 0.0) + AGAIN_S]
        found = await asyncio.gather(*(self._ask(endpoints[each]) for each in due))
        self._answers.update(zip(due, found, strict=True))
        self._asked_s.update(dict.fromkeys(due, now_s))
        return {worker_id for worker_id, answers in self._answers.items() if answers}

    async def _ask(self, endpoint: str) -> bool:
        async with self._limit:
            with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
                async with asyncio.timeout(TIMEOUT_S):
                    return await _answers_http(endpoint)
        return False


async def _answers_http(endpoint: str) -> bool:
    """Return whether a server speaks HTTP, or TLS with a certificate that it is not asked for.

    Raises OSError, ValueError, IncompleteReadError.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return False
    port = parts.port or (443 if parts.scheme == "https" else 80)
    context = None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # sends no secret
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    try:
        host = parts.netloc.rpartition("@")[2].encode("ascii", "replace")
        writer.write(b"GET /health HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host)
        await writer.drain()
        return await reader.readexactly(5) == b"HTTP/"
    finally:
        writer.close()
