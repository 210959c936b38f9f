"""Whether the HTTP servers of engines answer, for workers with event sockets that never did.

Such a worker may still serve requests, placed without knowledge of its cache. One that answers
nowhere is most likely a mistake in its registration, and requests sent to it would fail.
"""

import asyncio
from collections.abc import Collection, Mapping
from math import inf

import httpx

TIMEOUT_S = 1.0
AGAIN_S = 5.0
"""The interval of requests to the same server."""
AT_ONCE = 64
"""Concurrent requests, to any servers."""


class Reachability:
    """The last result for each server, and its time, by worker id."""

    __slots__ = ("_limit", "_seen")

    def __init__(self) -> None:
        self._seen: dict[int, tuple[bool, float]] = {}
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def answering(self, endpoints: Mapping[int, str], now_s: float) -> Collection[int]:
        """Return the workers with servers that answer; others are forgotten. O(workers)."""
        self._seen = {i: self._seen.get(i, (False, -inf)) for i in endpoints}
        due = [i for i, (_, asked_s) in self._seen.items() if now_s >= asked_s + AGAIN_S]
        if due:
            async with httpx.AsyncClient(verify=False, trust_env=False) as client:  # noqa: S501
                answers = await asyncio.gather(*(self._ask(client, endpoints[i]) for i in due))
            self._seen.update({i: (each, now_s) for i, each in zip(due, answers, strict=True)})
        return {worker_id for worker_id, (answers, _) in self._seen.items() if answers}

    async def _ask(self, client: httpx.AsyncClient, endpoint: str) -> bool:
        """Return whether a server sends any response. The request contains no secret."""
        async with self._limit:
            try:
                async with (
                    asyncio.timeout(TIMEOUT_S),
                    client.stream("GET", f"{endpoint.rstrip('/')}/health"),
                ):
                    return True
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, UnicodeError):
                return False
