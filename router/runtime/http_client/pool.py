"""A pool of persistent connections to servers.

The most recently used connection is taken first, so that surplus connections become idle and are
closed.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from urllib.parse import urlsplit

from msgspec import Struct

from router.errors import InvalidFieldError
from router.runtime.http_client.connection import (
    MOST_HEADS,
    Connection,
    NeverSentError,
    ResponseHead,
    UpstreamError,
    UpstreamResponse,
)
from router.runtime.http_server.head_cache import HeadCache
from router.runtime.security.config import is_ip_address
from router.runtime.security.http_access import ClientTls

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origin(Struct, frozen=True):
    """The address of a server; `prefix`: the path before all paths of requests."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(url: str) -> "Origin":
        """Return the origin of a URL. Raises InvalidFieldError for an invalid URL."""
        try:
            parts = urlsplit(url)
            port = parts.port or _DEFAULT_PORTS[parts.scheme]
        except (ValueError, KeyError) as error:
            raise InvalidFieldError("endpoint", repr(url), "http://host:port") from error
        if not parts.hostname or not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidFieldError("endpoint", repr(url), "http://host:port")
        return Origin(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """Host and port as in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_default = _DEFAULT_PORTS[self.scheme] == self.port
        return host if is_default else f"{host}:{self.port}"


class Request(Struct, frozen=True):
    """A request. Header names are in lower case; `own_headers` are those that other requests lack.

    `is_repeatable`: the request may be sent again if a reused connection proves to be closed.
    """

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    is_repeatable: bool = False
    own_headers: tuple[tuple[bytes, bytes], ...] = ()

    def encoded(self, origin: Origin) -> bytes:
        """Return the bytes of head and body in one piece.

        Raises InvalidFieldError for a header with a line break, which would be read as two headers.
        """
        first = _first_lines(self.method, origin, self.path, self.headers)
        own = _lines(self.own_headers)
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (first, own, len(self.body), self.body)


@lru_cache(maxsize=1024)
def _first_lines(
    method: str, origin: Origin, path: str, headers: tuple[tuple[bytes, bytes], ...]
) -> bytes:
    line = f"{method} {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n"
    return line.encode("ascii") + _lines(headers)


def _lines(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Return the lines of headers. Raises InvalidFieldError for a line break in one of them."""
    lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise InvalidFieldError("headers", "a line break in a header", "one line each")
    return lines


class PoolLimits(Struct, frozen=True):
    """`max_connections`: limit per server, busy ones included; beyond it, `NeverSentError`."""

    max_connections: int = 1024
    connect_timeout_s: float = 5.0
    head_timeout_s: float = 600.0
    idle_s: float = 20.0


class _Server:
    """The connections to one server: idle ones, most recently used last, each with its time.

    The time is that of its release.
    """

    __slots__ = ("_heads", "_lookup", "_loop", "busy", "idle", "name", "origin")

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self._heads: HeadCache[ResponseHead] = HeadCache(MOST_HEADS)
        self.origin = origin
        self.name = str(origin)
        self.idle: deque[tuple[float, Connection]] = deque()
        self.busy = 0
        self._loop = loop
        self._lookup: asyncio.Future[list[str]] | None = None

    async def addresses(self) -> list[str]:
        """Return the addresses of the host, the first one preferred. Raises OSError.

        One lookup serves all callers while it lasts: it cannot be cancelled, so that those of
        requests that timed out would queue up where the system's resolver is slow.
        """
        if is_ip_address(self.origin.host):
            return [self.origin.host]
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.ensure_future(_found(self.origin.host))
            self._lookup.add_done_callback(lambda found: found.cancelled() or found.exception())
        return await asyncio.shield(self._lookup)

    def connection(self) -> Connection:
        """Return a new connection, which returns to the pool when it is released."""
        return Connection(self.name, self._loop, self._back, self._heads)

    def _back(self, connection: Connection) -> None:
        self.busy -= 1
        if connection.is_reusable:
            self.idle.append((self._loop.time(), connection))


class HttpPool:
    """A client for many servers. It must be closed.

    `tls`: for https; None: the system's authorities, read for the first connection and again when
    they have changed. `tls_name`: the name in the servers' certificates; empty: their host's.
    """

    def __init__(
        self, limits: PoolLimits, tls: ssl.SSLContext | None = None, tls_name: str = ""
    ) -> None:
        self._limits = limits
        self._tls = tls
        self._tls_name = tls_name
        self._system_tls = ClientTls()
        self._servers: dict[Origin, _Server] = {}

    async def send(
        self, origin: Origin, request: Request, head_timeout_s: float | None = None
    ) -> UpstreamResponse:
        """Send a request and return its response. Raises UpstreamError.

        The response must be closed; closing it early aborts the request.
        """
        timeout_s = self._limits.head_timeout_s if head_timeout_s is None else head_timeout_s
        encoded = request.encoded(origin)
        server = self._servers.get(origin)
        if server is None:
            loop = asyncio.get_running_loop()
            server = self._servers[origin] = _Server(origin, loop)
        connection = self._idle(server) or await self._opened(server)
        try:
            return await connection.send(encoded, timeout_s)
        except BaseException as error:
            is_closed = isinstance(error, UpstreamError) and error.problem == "closed"
            is_stale = is_closed and not connection.is_fresh
            connection.finish()
            if not (is_stale and request.is_repeatable):
                raise
        # The server had closed the idle connection, as servers may, so the request was not
        # processed.
        return await self._retried(server, encoded, timeout_s)

    @asynccontextmanager
    async def response(
        self, origin: Origin, request: Request, head_timeout_s: float | None = None
    ) -> AsyncIterator[UpstreamResponse]:
        """Yield the response of a request, and close it on leaving."""
        answer = await self.send(origin, request, head_timeout_s)
        try:
            yield answer
        finally:
            answer.close()

    def close(self) -> None:
        """Close all idle connections; busy ones are closed on release."""
        for server in self._servers.values():
            for _, connection in server.idle:
                connection.abort()
        self._servers.clear()

    def close_old(self) -> None:
        """Close connections that were idle for `idle_s`; called periodically."""
        oldest_s = asyncio.get_running_loop().time() - self._limits.idle_s
        for origin, server in tuple(self._servers.items()):
            while server.idle and server.idle[0][0] < oldest_s:
                server.idle.popleft()[1].abort()
            if not server.idle and not server.busy:
                del self._servers[origin]

    @property
    def open_connections(self) -> int:
        """The number of connections to all servers, busy and idle."""
        return sum(server.busy + len(server.idle) for server in self._servers.values())

    async def _retried(self, server: _Server, encoded: bytes, timeout_s: float) -> UpstreamResponse:
        connection = await self._opened(server)
        try:
            return await connection.send(encoded, timeout_s)
        except BaseException:
            connection.finish()
            raise

    def _idle(self, server: _Server) -> Connection | None:
        """Take an idle connection, or return None. Raises NeverSentError if too many are busy."""
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
            tls = self._tls or self._system_tls.context()
        name = (self._tls_name or origin.host) if tls else None
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                connection = await _first_connected(server, await server.addresses(), tls, name)
        except TimeoutError as error:
            raise NeverSentError(server.name, "connect timeout") from error
        except (OSError, ssl.SSLError) as error:
            raise NeverSentError(server.name, "refused", str(error)) from error
        return connection


async def _first_connected(
    server: _Server, addresses: list[str], tls: ssl.SSLContext | None, tls_name: str | None
) -> Connection:
    """Return a connection to the first of the addresses that accepts one."""
    loop, port = asyncio.get_running_loop(), server.origin.port
    for address in addresses:
        try:
            _, connection = await loop.create_connection(
                server.connection, address, port, ssl=tls, server_hostname=tls_name
            )
            return connection
        except OSError:
            if address == addresses[-1]:
                raise
    raise OSError("no address of this name")


async def _found(host: str) -> list[str]:
    """Return the addresses of a host name, each once."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))
