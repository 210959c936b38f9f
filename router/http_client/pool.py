"""Connections to servers, kept while they are of use.

Whoever asks first gets the connection that was used last: those that nobody needs grow old, and are
closed.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct

from router.http_client.connection import Answer, Connection
from router.http_client.errors import NeverSentError, UpstreamError
from router.http_client.requests import Origin, Request


class PoolLimits(Struct, frozen=True):
    """`max_connections`: to each server, busy ones included; beyond, `NeverSentError`."""

    max_connections: int = 1024
    connect_timeout_s: float = 5.0
    head_timeout_s: float = 600.0
    idle_s: float = 20.0


class _Server:
    """Idle connections, the one used last behind; each with the time since which it is idle."""

    __slots__ = ("busy", "idle")

    def __init__(self) -> None:
        self.idle: deque[tuple[float, Connection]] = deque()
        self.busy = 0


class HttpPool:
    """Asks servers. Has to be closed. `tls`: for https; None checks as the system does."""

    def __init__(self, limits: PoolLimits, tls: ssl.SSLContext | None = None) -> None:
        self._limits = limits
        self._tls = tls
        self._servers: dict[Origin, _Server] = {}

    @asynccontextmanager
    async def asked(
        self, origin: Origin, request: Request, head_timeout_s: float | None = None
    ) -> AsyncIterator[Answer]:
        """The answer to a request. Raises UpstreamError. Leaving early ends the request."""
        timeout_s = self._limits.head_timeout_s if head_timeout_s is None else head_timeout_s
        server = self._servers.setdefault(origin, _Server())
        encoded = request.encoded(origin)
        connection = await self._connection(origin, server)
        try:
            try:
                answer = await connection.ask(encoded, timeout_s)
            except UpstreamError as error:
                is_stale = error.problem == "closed" and not connection.is_fresh
                if not (is_stale and request.is_repeatable):
                    raise
                # It was closed while it was idle, as servers do: nothing was lost but a moment.
                connection.abort()
                connection = await self._opened(origin)
                answer = await connection.ask(encoded, timeout_s)
            yield answer
        finally:
            server.busy -= 1
            connection.finish()
            if connection.is_reusable:
                server.idle.append((asyncio.get_running_loop().time(), connection))

    def close(self) -> None:
        """Close all that are idle; the others when they are left."""
        for server in self._servers.values():
            for _, connection in server.idle:
                connection.abort()
        self._servers.clear()

    def close_old(self) -> None:
        """Close what nobody has used for long; to be called now and then."""
        oldest_s = asyncio.get_running_loop().time() - self._limits.idle_s
        for origin, server in tuple(self._servers.items()):
            while server.idle and server.idle[0][0] < oldest_s:
                server.idle.popleft()[1].abort()
            if not server.idle and not server.busy:
                del self._servers[origin]

    @property
    def open_connections(self) -> int:
        """Of all servers, busy and idle."""
        return sum(server.busy + len(server.idle) for server in self._servers.values())

    async def _connection(self, origin: Origin, server: _Server) -> Connection:
        if server.busy >= self._limits.max_connections:
            most = f"{self._limits.max_connections} connections at once"
            raise NeverSentError(str(origin), "busy", most)
        server.busy += 1
        while server.idle:
            _, connection = server.idle.pop()
            if connection.is_reusable:
                return connection
        try:
            return await self._opened(origin)
        except BaseException:
            server.busy -= 1
            raise

    async def _opened(self, origin: Origin) -> Connection:
        tls = None
        if origin.scheme == "https":
            tls = self._tls or ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(str(origin)),
                    origin.host,
                    origin.port,
                    ssl=tls,
                    server_hostname=origin.host if tls else None,
                )
        except TimeoutError as error:
            raise NeverSentError(str(origin), "connect timeout") from error
        except (OSError, ssl.SSLError) as error:
            raise NeverSentError(str(origin), "refused", str(error)) from error
        return connection
