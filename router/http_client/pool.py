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
from router.http_client.known_answers import KnownAnswers
from router.http_client.requests import Origin, Request


class PoolLimits(Struct, frozen=True):
    """`max_connections`: to each server, busy ones included; beyond, `NeverSentError`."""

    max_connections: int = 1024
    connect_timeout_s: float = 5.0
    head_timeout_s: float = 600.0
    idle_s: float = 20.0


class _Server:
    """Idle connections, the one used last behind; each with the time since which it is idle."""

    __slots__ = ("_known", "_loop", "busy", "idle", "name", "origin")

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self._known = KnownAnswers()
        self.origin = origin
        self.name = str(origin)
        self.idle: deque[tuple[float, Connection]] = deque()
        self.busy = 0
        self._loop = loop

    def connection(self) -> Connection:
        """A new one, that comes back when it is not needed."""
        return Connection(self.name, self._loop, self._back, self._known)

    def _back(self, connection: Connection) -> None:
        self.busy -= 1
        if connection.is_reusable:
            self.idle.append((self._loop.time(), connection))


class HttpPool:
    """Asks servers. Has to be closed. `tls`: for https; None checks as the system does."""

    def __init__(self, limits: PoolLimits, tls: ssl.SSLContext | None = None) -> None:
        self._limits = limits
        self._tls = tls
        self._servers: dict[Origin, _Server] = {}

    async def ask(
        self, origin: Origin, request: Request, head_timeout_s: float | None = None
    ) -> Answer:
        """The answer to a request, which has to be closed: early ends the request. Raises
        UpstreamError.
        """
        timeout_s = self._limits.head_timeout_s if head_timeout_s is None else head_timeout_s
        encoded = request.encoded(origin)
        server = self._servers.get(origin)
        if server is None:
            loop = asyncio.get_running_loop()
            server = self._servers[origin] = _Server(origin, loop)
        connection = self._idle(server) or await self._opened(server)
        try:
            return await connection.ask(encoded, timeout_s)
        except BaseException as error:
            is_closed = isinstance(error, UpstreamError) and error.problem == "closed"
            is_stale = is_closed and not connection.is_fresh
            connection.finish()
            if not (is_stale and request.is_repeatable):
                raise
        # It was closed while it was idle, as servers do: nothing was lost but a moment.
        return await self._asked_anew(server, encoded, timeout_s)

    @asynccontextmanager
    async def asked(
        self, origin: Origin, request: Request, head_timeout_s: float | None = None
    ) -> AsyncIterator[Answer]:
        """The same, closed on leaving."""
        answer = await self.ask(origin, request, head_timeout_s)
        try:
            yield answer
        finally:
            answer.close()

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

    async def _asked_anew(self, server: _Server, encoded: bytes, timeout_s: float) -> Answer:
        connection = await self._opened(server)
        try:
            return await connection.ask(encoded, timeout_s)
        except BaseException:
            connection.finish()
            raise

    def _idle(self, server: _Server) -> Connection | None:
        """One that is kept, busy from now on. Raises NeverSentError if too many are."""
        if server.busy >= self._limits.max_connections:
            most = f"{self._limits.max_connections} connections at once"
            raise NeverSentError(server.name, "busy", most)
        while server.idle:
            _, connection = server.idle.pop()
            if connection.is_reusable:
                server.busy += 1
                return connection
        return None

    async def _opened(self, server: _Server) -> Connection:
        server.busy += 1
        try:
            return await self._connected(server)
        except BaseException:
            server.busy -= 1
            raise

    async def _connected(self, server: _Server) -> Connection:
        origin, tls = server.origin, None
        if origin.scheme == "https":
            tls = self._tls or ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                _, connection = await loop.create_connection(
                    server.connection,
                    origin.host,
                    origin.port,
                    ssl=tls,
                    server_hostname=origin.host if tls else None,
                )
        except TimeoutError as error:
            raise NeverSentError(server.name, "connect timeout") from error
        except (OSError, ssl.SSLError) as error:
            raise NeverSentError(server.name, "refused", str(error)) from error
        return connection
