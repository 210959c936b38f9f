"""HTTP connections within limits: of their number, of what comes before a body, of patience.

uvicorn bounds none of these, but for requests at once. Whoever goes beyond is answered in the shape
of every other refusal, where there is anybody to answer, and closed. Nobody has a timer: the server
looks ten times a second at whose patience has ended.

    accepted ─▶ headers, in time and within size ─▶ answer ─▶ rest of the body, in time ─┐
        ▲                                                                                │
        └─────────────────────── idle for a while: closed ◀──────────────────────────────┘
"""

from asyncio import Transport
from collections.abc import Callable
from http import HTTPStatus
from math import inf
from typing import Any

import msgspec
import uvicorn
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import KvRouterError
from router.security.config import SecurityConfig

REST_S = 2.0
"""Who was answered before its body was read has so long to say the rest."""

HURRY_S = 1.0
"""A connection that is one too many has so long to be told."""


class HttpLimits(Struct, frozen=True):
    """What a server takes of its callers."""

    max_connections: int = 4096
    header_limit_bytes: int = 32 * 1024
    max_headers: int = 100
    header_timeout_s: float = 10.0
    keep_alive_s: float = 5.0

    @classmethod
    def of(cls, config: SecurityConfig, max_connections: int) -> "HttpLimits":
        """Of connections, and of what comes before a body."""
        return cls(
            max_connections,
            config.header_limit_bytes,
            config.max_headers,
            config.header_timeout_s,
            config.keep_alive_s,
        )


class MalformedRequestError(KvRouterError):
    """Not HTTP, or HTTP of which two readers could think differently."""

    code = "malformed_request"
    http_status = 400

    def __init__(self) -> None:
        super().__init__("request: not HTTP/1.1, or ambiguous (allowed: RFC 9112)")


class HeadersTooLargeError(KvRouterError):
    """Request line and headers are more than is read."""

    code = "headers_too_large"
    http_status = 431

    def __init__(self, limits: HttpLimits) -> None:
        size_bytes, count = limits.header_limit_bytes, limits.max_headers
        super().__init__(f"headers: too large (allowed: {size_bytes} bytes, {count} headers)")


class HeaderTimeoutError(KvRouterError):
    """Request line and headers did not come in time."""

    code = "header_timeout"
    http_status = 408

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(f"headers: not received in time (allowed: {limits.header_timeout_s} s)")


class TooManyConnectionsError(KvRouterError):
    """As many connections are open as may be."""

    code = "too_many_connections"
    http_status = 503
    retry_after_s = 1.0

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(f"connections: too many (allowed: {limits.max_connections})")


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration, and ours: where its protocol finds it. `refused` is told the codes
    of refusals that no application saw.
    """

    def __init__(
        self, *args: Any, limits: HttpLimits, refused: Callable[[str], None], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.refused = refused


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Costs a request that comes whole two comparisons, and a look at the time.

    Until `_head_until_s` a head has to be whole, until `_idle_until_s` something has to come.
    """

    config: HttpConfig
    headers: list[tuple[bytes, bytes]]
    _refusal: KvRouterError | None = None
    _head_until_s = _idle_until_s = inf
    _head_bytes = 0
    _chunk_bytes = 0
    _is_in_head = True
    _has_head_ended = False
    _is_surplus = False
    cycle: Any = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """A connection: one that is far too many is closed at once."""
        super().connection_made(transport)
        self.headers = []
        limits = self.config.limits
        open_connections = len(self.connections)
        self._is_surplus = open_connections > limits.max_connections
        if open_connections > 2 * limits.max_connections:
            self.config.refused(TooManyConnectionsError.code)
            transport.abort()
        self._expect_head(HURRY_S if self._is_surplus else limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Bytes, of which some may belong to a request's head."""
        if self._refusal is not None:
            return
        self._chunk_bytes, self._has_head_ended = len(data), False
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            # What came behind another request's head is counted from the next bytes on.
            self._head_bytes += 0 if self._has_head_ended else len(data)
            self._check_head(self._head_bytes)
            if self._head_until_s == inf:
                self._expect_head(self.config.limits.header_timeout_s)

    def on_message_begin(self) -> None:
        """A head begins. What uvicorn does then is done once it is whole."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        """A head is whole. Raises what is wrong with it: the parser stops there."""
        self._head_until_s = self._idle_until_s = inf
        self._is_in_head = False
        if self._is_surplus:
            self._refusal = TooManyConnectionsError(self.config.limits)
            raise self._refusal
        limits = self.config.limits
        if len(self.headers) > limits.max_headers or self._is_head_too_large(limits):
            self._refusal = HeadersTooLargeError(limits)
            raise self._refusal
        self._head_bytes, self._has_head_ended = 0, True
        self.begin_request()

    def begin_request(self) -> None:
        """A request whose head is here goes uvicorn's way."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # which the scope has as well
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """An answer is sent; its request may have more to say, which nobody reads."""
        super().on_response_complete()
        self._unset_keepalive_if_required()
        cycle = self.cycle
        if cycle.response_complete:
            self.be_idle(REST_S if cycle.more_body else self.config.limits.keep_alive_s)

    def be_idle(self, within_s: float) -> None:
        """Everything is answered; another head has to begin in time."""
        self._head_until_s, self._idle_until_s = inf, self.loop.time() + within_s

    def check_patience(self, now_s: float) -> None:
        """Close the connection if what has to come has not."""
        if now_s > self._head_until_s:
            self._head_until_s = inf
            surplus = TooManyConnectionsError if self._is_surplus else HeaderTimeoutError
            self._refuse(surplus(self.config.limits))
        elif now_s > self._idle_until_s:
            self._idle_until_s = inf
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """What uvicorn says of what it cannot parse, in our words."""
        self._refuse(self._refusal or MalformedRequestError())

    def _check_head(self, size_bytes: int) -> None:
        limits = self.config.limits
        if size_bytes > limits.header_limit_bytes or len(self.headers) > limits.max_headers:
            self._refuse(HeadersTooLargeError(limits))

    def _is_head_too_large(self, limits: HttpLimits) -> bool:
        """Most are not, whatever of the last bytes belongs to the body."""
        if self._head_bytes + self._chunk_bytes <= limits.header_limit_bytes:
            return False
        size_bytes = len(self.url) + sum(len(k) + len(v) + 4 for k, v in self.headers)
        return size_bytes > limits.header_limit_bytes

    def _expect_head(self, within_s: float) -> None:
        self._head_until_s = self.loop.time() + within_s
        self._idle_until_s = inf

    def _refuse(self, error: KvRouterError) -> None:
        """Answer below the application, and close. Where another answer is due, only close."""
        self._refusal = error
        self.config.refused(error.code)
        if self.transport.is_closing():
            return
        if self._may_answer():
            self.transport.write(_answer(error))
        self.transport.close()

    def _may_answer(self) -> bool:
        """Is nothing else to be said before? A request whose body is amiss gets no other answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        is_amiss = cycle.more_body and not cycle.response_started and not self.pipeline
        cycle.disconnected = cycle.disconnected or is_amiss
        return bool(is_amiss)


def _answer(error: KvRouterError) -> bytes:
    body = msgspec.json.encode(error.body())
    status = HTTPStatus(error.http_status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
