"""One stream of another router: requested, read until it ends, with the reason for its end."""

import asyncio
from collections.abc import Callable

import msgspec
from msgspec import Struct

from router.config.discovery import PeerConfig
from router.errors import ConfigError, WireError
from router.ingest.errors import PeerItselfError
from router.ingest.peer_streams import Kind, RecordReader, decode_greeting
from router.protocol.replicas import PeerGreeting, PeerState
from router.protocol.values import UNREADABLE
from router.runtime.http_client.connection import UpstreamError, UpstreamResponse
from router.runtime.http_client.pool import HttpPool, Origin, PoolLimits, Request
from router.runtime.security.config import SecurityConfig
from router.runtime.security.http_access import ClientTls, HttpAccess

STREAM_PATH = "/replica_sync/stream"
CONNECT_S = 2.0
SILENT_S = 2.0
"""Time without a byte after which a stream is given up; heartbeats come each HEARTBEAT_S."""

UNINTERRUPTED_RECORDS = 32
MOST_REFUSAL_BYTES = 64 << 10
MOST_REFUSAL_CHARACTERS = 512


class StreamEndError(Exception):
    """The end of a stream, with the state that its router is in from then on."""

    def __init__(self, state: PeerState, problem: str | None) -> None:
        super().__init__(problem)
        self.state: PeerState = state
        self.problem = problem


class PeerReader:
    """Reads streams of routers that are all reached in the same way.

    `tls_name`: the name in their certificates; empty: the host of each address.
    """

    __slots__ = ("_access", "_body", "_tls", "scheme", "tls_name")

    def __init__(
        self, config: PeerConfig, security: SecurityConfig, greeting: PeerGreeting
    ) -> None:
        """Raise ConfigError for unusable files of TLS."""
        self._body = msgspec.json.encode(greeting)
        self.scheme = "https" if security.tls_cert_file else "http"
        self._access = HttpAccess(config.router_peers_token_file)
        own = ("", "")
        if security.tls_client_ca_file:
            own = (security.tls_cert_file, security.tls_key_file)
        self._tls = ClientTls(config.router_peers_ca_file, *own, prefix="router_peers")
        self.tls_name = ""

    async def read(
        self,
        origin: Origin,
        greet: Callable[[PeerGreeting], None],
        take: Callable[[Kind, bytes], None],
    ) -> None:
        """Read a stream until it ends. Always raises StreamEndError, or what `take` raises.

        `greet`: called first, with what the router says of itself; may raise StreamEndError.
        `take`: called with each message.
        """
        pool, request = self._prepared()
        try:
            async with pool.response(origin, request) as response:
                if response.status != 200:
                    raise _refusal(await response.read(MOST_REFUSAL_BYTES, SILENT_S), response)
                await _take_all(response, greet, take)
        except UpstreamError as error:
            problem = f"{error.problem}{f': {error.detail}' if error.detail else ''}"
            raise StreamEndError("unreachable", problem) from error
        except WireError as error:
            raise StreamEndError("refused", f"its stream cannot be read: {error}") from error
        finally:
            pool.close()
        raise StreamEndError("unreachable", "it has ended its stream")

    def _prepared(self) -> tuple[HttpPool, Request]:
        """Return a request with the present token and authorities. Raises StreamEndError."""
        try:
            headers = self._access.headers("router_peers")
            tls = self._tls.context() if self.scheme == "https" else None
        except ConfigError as error:
            raise StreamEndError("refused", str(error)) from error
        lines = [(b"content-type", b"application/json")]
        lines += [(name.encode(), value.encode("ascii")) for name, value in headers.items()]
        limits = PoolLimits(1, CONNECT_S, head_timeout_s=SILENT_S)
        return HttpPool(limits, tls, self.tls_name), Request(
            "POST", STREAM_PATH, self._body, tuple(lines)
        )


async def _take_all(
    response: UpstreamResponse,
    greet: Callable[[PeerGreeting], None],
    take: Callable[[Kind, bytes], None],
) -> None:
    """Take the records of a stream until it ends. Raises UpstreamError, WireError."""
    records, count = RecordReader(), 0
    async for chunk in response.chunks(SILENT_S):
        for kind, payload in records.feed(chunk):
            if (kind is Kind.GREETING) != (count == 0):
                raise WireError("a greeting belongs at the beginning")
            if kind is Kind.GREETING:
                greet(decode_greeting(payload))
            else:
                take(kind, payload)
            count += 1
            if count % UNINTERRUPTED_RECORDS == 0:
                await asyncio.sleep(0)


class _Refusal(Struct):
    """The error response of a router; one of another process may lack its fields."""

    error: str = ""
    code: str = ""


def _refusal(body: bytes, response: UpstreamResponse) -> StreamEndError:
    """Return the error of a response that is no stream: a passing one, or one of settings."""
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except UNREADABLE:
        refusal = _Refusal()
    if refusal.code == PeerItselfError.code:
        return StreamEndError("itself", None)
    reason = f": {refusal.error[:MOST_REFUSAL_CHARACTERS]}" if refusal.error else ""
    is_passing = response.status >= 500 or response.status in (408, 429)
    state: PeerState = "unreachable" if is_passing else "refused"
    return StreamEndError(state, f"{response.status}{reason}")
