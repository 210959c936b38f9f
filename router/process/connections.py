"""HTTP connections within limits: of their number, of what comes before a body, of patience.

uvicorn bounds none of these, but for requests at once. Whoever goes beyond is answered in the shape
of every other refusal, where there is anybody to answer, and closed.

    accepted ─▶ headers, in time and within size ─▶ answer ─▶ rest of the body, in time ─┐
        ▲                                                                                │
        └─────────────────────── idle for a while: closed ◀──────────────────────────────┘
"""

from asyncio import TimerHandle, Transport
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec
import uvicorn
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import KvRouterError

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
    """One connection. Costs a request that comes whole two comparisons."""

    config: HttpConfig
    _header_timer: TimerHandle | None = None
    _refusal: KvRouterError | None = None
    _head_bytes = 0
    _chunk_bytes = 0
    _has_head_ended = False
    _is_surplus = False
    scope: Any = None
    cycle: Any = None
    NOTHING: ClassVar[dict[str, Any]] = {}

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """A connection: one that is far too many is closed at once."""
        super().connection_made(transport)
        limits = self.config.limits
        open_connections = len(self.connections)
        self._is_surplus = open_connections > limits.max_connections
        if open_connections > 2 * limits.max_connections:
            self.config.refused(TooManyConnectionsError.code)
            transport.abort()
        self._expect_head(HURRY_S if self._is_surplus else limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes, of which some may belong to a request's head."""
        if self._refusal is not None:
            return
        self._chunk_bytes, self._has_head_ended = len(data), False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.scope is None or "method" not in self.scope:
            # What came behind another request's head is counted from the next bytes on.
            self._head_bytes += 0 if self._has_head_ended else len(data)
            self._check_head(self._head_bytes)
            if self._header_timer is None:
                self._expect_head(self.config.limits.header_timeout_s)

    def on_headers_complete(self) -> None:
        """A head is whole. Raises what is wrong with it: the parser stops there."""
        self._head_is_here()
        if self._is_surplus:
            self._refusal = TooManyConnectionsError(self.config.limits)
            raise self._refusal
        limits = self.config.limits
        if len(self.headers) > limits.max_headers or self._is_head_too_large(limits):
            self._refusal = HeadersTooLargeError(limits)
            raise self._refusal
        self._head_bytes, self._has_head_ended = 0, True
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """An answer is sent; its request may have more to say, which nobody reads."""
        cycle = self.cycle
        super().on_response_complete()
        if cycle.response_complete and cycle.more_body and not self.transport.is_closing():
            self.loop.call_later(REST_S, self._close_unless_past, cycle)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """What uvicorn says of what it cannot parse, in our words."""
        self._refuse(self._refusal or MalformedRequestError())

    def _check_head(self, size_bytes: int) -> None:
        limits = self.config.limits
        headers = (self.scope or self.NOTHING).get("headers", ())
        if size_bytes > limits.header_limit_bytes or len(headers) > limits.max_headers:
            self._refuse(HeadersTooLargeError(limits))

    def _is_head_too_large(self, limits: HttpLimits) -> bool:
        """Most are not, whatever of the last bytes belongs to the body."""
        if self._head_bytes + self._chunk_bytes <= limits.header_limit_bytes:
            return False
        size_bytes = len(self.url) + sum(len(k) + len(v) + 4 for k, v in self.headers)
        return size_bytes > limits.header_limit_bytes

    def _expect_head(self, within_s: float) -> None:
        self._header_timer = self.loop.call_later(within_s, self._head_is_late)

    def _head_is_here(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _head_is_late(self) -> None:
        self._header_timer = None
        limits = self.config.limits
        surplus = TooManyConnectionsError(limits) if self._is_surplus else None
        self._refuse(surplus or HeaderTimeoutError(limits))

    def _close_unless_past(self, cycle: Any) -> None:
        if self.cycle is cycle:
            self.transport.close()

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
