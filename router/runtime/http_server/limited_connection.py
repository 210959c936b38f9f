"""HTTP connections with limits: of their number, of request heads, and of time.

uvicorn bounds only the number of concurrent requests. A request beyond a limit receives an error
response in the common shape, if no other response is due first, and its connection is closed.
Connections have no timers: the server checks their timeouts ten times a second.

    accepted ─▶ headers, in time and within size ─▶ response ─▶ rest of the body, in time ─┐
        ▲                                                                                  │
        └─────────────────────── idle for a while: closed ◀────────────────────────────────┘

Trailers are ignored. No connection is upgraded to another protocol: a request for an upgrade
receives an HTTP response, and its connection is closed. A client that has closed its sending side
only still receives its response.
"""

from asyncio import Transport
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import KvRouterError
from router.runtime.http_server.exchange import JSON_PAIR, FirstLines
from router.runtime.http_server.limits import (
    HeadersTooLargeError,
    HeaderTimeoutError,
    HttpLimits,
    MalformedRequestError,
    MisdirectedRequestError,
    TooManyConnectionsError,
)
from router.runtime.security.config import is_local_name

if TYPE_CHECKING:
    from router.runtime.http_server.direct_protocol import HotService

REST_S = 2.0
"""Timeout for the rest of a request body after the response, in seconds."""

HURRY_S = 1.0
"""Timeout for the head of a request on a surplus connection, which is refused, in seconds."""


LEAST_TAKEN_BYTES = 16_384
"""The least that a client must read in each `stuck_s`; otherwise its connection is aborted."""

STILL_THERE_S = 1.0
"""Interval of the probes whether a half-closed client still reads, in seconds."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LENGTHS = (b"content-length", b"transfer-encoding")


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration with the limits of this module, for its protocol.

    `refused`: called with the code of each request refused below the application. `hot`: the
    service of requests that are answered below the application.
    """

    def __init__(
        self,
        *args: Any,
        limits: HttpLimits,
        refused: Callable[[str], None],
        hot: "HotService | None",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.refused = refused
        self.hot = hot


class _RestOf:
    """The callbacks of a parser that reads one body only."""

    def __init__(self, connection: "LimitedProtocol") -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_last_message_complete


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A request that arrives whole costs a few comparisons and a clock read.

    `_head_until_s`: deadline of a whole head. `_idle_until_s`: deadline of the next request.
    `_stuck_until_s`: deadline of the client's reading. `_ask_at_s`: time of the next probe of a
    half-closed client. `_barren_bytes`: bytes received since the head or the last piece of a body
    that were neither. `_is_between`: the next bytes begin a request that may be answered.
    """

    config: HttpConfig
    headers: Any
    _refusal: KvRouterError | None = None
    _head_until_s = _idle_until_s = _stuck_until_s = _ask_at_s = inf
    _barren_bytes = _unsent_bytes = 0
    _has_body_come = _is_upgrade = _is_deaf = False
    _head_bytes = 0
    _chunk_bytes = 0
    _is_in_head = _is_between = True
    _has_head_ended = False
    _is_surplus = False
    cycle: Any = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Accept a connection; abort it at once if there are more than twice the allowed number."""
        super().connection_made(transport)
        self.headers = []
        limits = self.config.limits
        self._keep_alive_s, self._is_half_closed = limits.keep_alive_s, False
        open_connections = len(self.connections)
        self._is_surplus = open_connections > limits.max_connections
        self._is_between = not self._is_surplus
        if open_connections > 2 * limits.max_connections:
            self.config.refused(TooManyConnectionsError.code)
            transport.abort()
        self._expect_head(HURRY_S if self._is_surplus else limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, and check the limits of heads."""
        if self._refusal is not None or self._is_deaf:
            return
        self._chunk_bytes, self._has_head_ended, self._has_body_come = len(data), False, False
        self._parse(data)
        if self._has_body_come:
            self._barren_bytes = 0
        elif not self._is_in_head:
            self._check_rest(len(data))
        if self._is_in_head and not self.transport.is_closing():
            # Bytes of a head that follow another request's head are counted from the next chunk on.
            self._head_bytes += 0 if self._has_head_ended else len(data)
            self._check_head(self._head_bytes)
            if self._head_until_s == inf:
                self._expect_head(self.config.limits.header_timeout_s)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._is_deaf:
                self.send_400_response("")

    def _stay(self, rest: bytes) -> None:
        """Parse the bytes after an upgrade request as its body.

        The parser leaves them to another protocol. Ignoring them as well would let two servers read
        this request differently.
        """
        lines = [b"%b: %b\r\n" % pair for pair in self._lengths]
        self._is_upgrade = False
        self.parser = httptools.HttpRequestParser(_RestOf(self))
        self._parse(b"POST / HTTP/1.1\r\nconnection: close\r\n%b\r\n%b" % (b"".join(lines), rest))

    def on_message_begin(self) -> None:
        """Begin a head. uvicorn's work at this point is done once the head is whole."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_in_head, self._is_between = True, False

    def on_headers_complete(self) -> None:
        """Check a whole head, and begin its request. Raises the error, which stops the parser."""
        self._head_until_s = self._idle_until_s = inf
        self._is_in_head = False
        if self._is_surplus:
            self._refusal = TooManyConnectionsError(self.config.limits)
            raise self._refusal
        limits = self.config.limits
        if len(self.headers) > limits.max_headers or self._is_head_too_large(limits):
            self._refusal = HeadersTooLargeError(limits)
            raise self._refusal
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) != 1 and (hosts or self.parser.get_http_version() == "1.1"):
            self._refusal = MalformedRequestError()
            raise self._refusal
        if limits.local_names_only and not all(map(is_local_name, hosts)):
            self._refusal = MisdirectedRequestError()
            raise self._refusal
        self._head_bytes, self._has_head_ended, self._barren_bytes = 0, True, 0
        self._is_upgrade = bool(self.parser.should_upgrade())
        if self._is_upgrade:
            self._lengths = [pair for pair in self.headers if pair[0] in _LENGTHS]
        self.begin_request()
        self.headers = deque(maxlen=0)  # drops trailers
        if self._is_upgrade and self.cycle is not None:
            self.cycle.keep_alive = False

    def begin_request(self) -> None:
        """Pass a request with a whole head to uvicorn."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # the scope shares the list
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body."""
        self._has_body_come = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, unless it is an upgrade request, which the parser ends too early."""
        if not self._is_upgrade:
            self._is_between = True
            self.end_request()

    def on_last_message_complete(self) -> None:
        """End a request after which nothing is read."""
        self._is_deaf = True
        self.end_request()

    def end_request(self) -> None:
        """End a request. One that was answered before its body came leaves the connection idle."""
        super().on_message_complete()
        cycle = self.cycle
        if cycle is not None and cycle.response_complete:
            cycle.more_body = False
            self.end_response()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's data. Returns True if it may still wait for a response."""
        cycle = self.cycle
        is_over = cycle is None or cycle.response_complete or cycle.more_body
        if is_over or self._is_in_head or self.scheme == "https":  # TLS closes both directions
            self.transport.close()  # sends what waits for the end of the loop iteration
            return False
        self._is_half_closed = bool(self.pipeline) or self.send_keepalive()
        self._ask_at_s = self.loop.time()
        return self._is_half_closed

    def send_keepalive(self) -> bool:
        """Send bytes to a half-closed client; a closed one replies with a reset.

        Later bytes detect the reset. Returns False if there is nothing to send.
        """
        if not self.cycle.response_started and self.has_interim_answers:
            self.transport.write(CONTINUE)
        return not self.cycle.response_started

    @property
    def has_interim_answers(self) -> bool:
        """True if the client's HTTP version has interim responses."""
        return bool(self.parser.get_http_version() != "1.0")

    def pause_writing(self) -> None:
        """Start the deadline of a client that does not read."""
        super().pause_writing()
        self._expect_to_be_read(self.loop.time())

    def resume_writing(self) -> None:
        """Clear the deadline: the client reads again."""
        super().resume_writing()
        self._stuck_until_s = inf

    def on_response_complete(self) -> None:
        """Handle the end of a response, and begin the next queued request."""
        self.end_response()
        if not self.transport.is_closing():
            self.go_on()

    def go_on(self) -> None:
        """Begin the next queued request."""
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def end_response(self) -> None:
        """Handle the end of a response; the rest of its request is ignored.

        Does the same as uvicorn, without its timer.
        """
        cycle = self.cycle
        if cycle.response_complete:
            within_s = REST_S if cycle.more_body else self._keep_alive_s
            self._head_until_s, self._idle_until_s = inf, self.loop.time() + within_s
            if self._is_half_closed:
                self.transport.close()

    def check_patience(self, now_s: float) -> None:
        """Apply the timeouts of the connection."""
        if now_s > self._head_until_s:
            self._head_until_s = inf
            surplus = TooManyConnectionsError if self._is_surplus else HeaderTimeoutError
            self._refuse(surplus(self.config.limits))
        elif now_s > self._idle_until_s:
            self._idle_until_s = inf
            self.transport.close()
        elif now_s > self._stuck_until_s:
            self._check_reading(now_s)
        elif self.transport.is_closing():
            if self._stuck_until_s == inf:
                self._expect_to_be_read(now_s)
        elif now_s > self._ask_at_s and not self.pipeline:
            self._ask_at_s = now_s + STILL_THERE_S
            self.send_keepalive()

    def _expect_to_be_read(self, now_s: float) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._stuck_until_s = now_s + self.config.limits.stuck_s

    def _check_reading(self, now_s: float) -> None:
        before = self._unsent_bytes
        self._expect_to_be_read(now_s)
        if self._unsent_bytes > before - LEAST_TAKEN_BYTES:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse an unparsable request with this project's error in place of uvicorn's text."""
        self._refuse(self._refusal or MalformedRequestError())

    def _check_head(self, size_bytes: int) -> None:
        limits = self.config.limits
        if size_bytes > limits.header_limit_bytes or len(self.headers) > limits.max_headers:
            self._refuse(HeadersTooLargeError(limits))

    def _check_rest(self, size_bytes: int) -> None:
        """Bound chunk extensions and trailers as heads are bounded."""
        self._barren_bytes += size_bytes
        is_open = self.cycle is not None and self.cycle.more_body and not self._has_head_ended
        if is_open and self._barren_bytes > self.config.limits.header_limit_bytes:
            self._refuse(HeadersTooLargeError(self.config.limits))

    def _is_head_too_large(self, limits: HttpLimits) -> bool:
        """Return whether a head is too large; exact only if the bytes received exceed the limit."""
        if self._head_bytes + self._chunk_bytes <= limits.header_limit_bytes:
            return False
        size_bytes = len(self.url) + sum(len(k) + len(v) + 4 for k, v in self.headers)
        return size_bytes > limits.header_limit_bytes

    def _expect_head(self, within_s: float) -> None:
        self._head_until_s = self.loop.time() + within_s
        self._idle_until_s = inf

    def _refuse(self, error: KvRouterError) -> None:
        """Send an error response and close; only close if another response is due first."""
        self._refusal = error
        self.config.refused(error.code)
        if self.transport.is_closing():
            return
        if self._may_answer():
            status, reply = self.error_reply(error)
            body = msgspec.json.encode(reply)
            pairs = (JSON_PAIR, (b"content-length", b"%d" % len(body)), (b"connection", b"close"))
            self.transport.write(b"%b\r\n%b" % (FirstLines(pairs)[status], body))
        self.transport.close()

    def error_reply(self, error: KvRouterError) -> tuple[int, object]:
        """Return the status and the body of an error response."""
        return error.http_status, error.body()

    def _may_answer(self) -> bool:
        """Return whether no other response is due first.

        A request with an invalid body receives only this error response.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        is_amiss = cycle.more_body and not cycle.response_started and not self.pipeline
        cycle.disconnected = cycle.disconnected or is_amiss
        return bool(is_amiss)
