"""HTTP connections within limits: of their number, of what comes before a body, of patience.

uvicorn bounds none of these, but for requests at once. Whoever goes beyond is answered in the shape
of every other refusal, where there is anybody to answer, and closed. Nobody has a timer: the server
looks ten times a second at whose patience has ended.

    accepted ─▶ headers, in time and within size ─▶ answer ─▶ rest of the body, in time ─┐
        ▲                                                                                │
        └─────────────────────── idle for a while: closed ◀──────────────────────────────┘

Trailers are no headers: nobody reads them. Nobody is upgraded to another protocol: who asks for
that is answered in this one, and closed. Who says that it has no more to say, and may still listen,
is answered, too.
"""

from asyncio import Transport
from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from math import inf
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import KvRouterError
from router.process.http_limits import (
    HeadersTooLargeError,
    HeaderTimeoutError,
    HttpLimits,
    MalformedRequestError,
    MisdirectedRequestError,
    TooManyConnectionsError,
)
from router.security.config import is_local_name

REST_S = 2.0
"""Who was answered before its body was read has so long to say the rest."""

HURRY_S = 1.0
"""A connection that is one too many has so long to be told."""


LEAST_TAKEN_BYTES = 16_384
"""Who takes less of what it is sent than this, each `stuck_s`, does not take it."""

STILL_THERE_S = 1.0
"""Between two questions to somebody who has no more to say whether it still listens."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LENGTHS = (b"content-length", b"transfer-encoding")


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


class _RestOf:
    """What a parser tells that reads nothing but one body."""

    def __init__(self, connection: "LimitedProtocol") -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_last_message_complete


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Costs a request that comes whole a few comparisons, and a look at the time.

    Until `_head_until_s` a head has to be whole, until `_idle_until_s` something has to come, until
    `_stuck_until_s` what was written has to be taken; at `_ask_at_s` who has no more to say is
    asked whether it is there. `_barren_bytes` came since the head or the last piece of a body, and
    were neither. `_is_between`: what comes next begins a request.
    """

    config: HttpConfig
    headers: Any
    _refusal: KvRouterError | None = None
    _head_until_s = _idle_until_s = _stuck_until_s = _ask_at_s = inf
    _barren_bytes = _unsent_bytes = 0
    _has_body_come = _is_upgrade = _is_deaf = _is_half_closed = False
    _head_bytes = 0
    _chunk_bytes = 0
    _is_in_head = _is_between = True
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
        if self._refusal is not None or self._is_deaf:
            return
        self._chunk_bytes, self._has_head_ended, self._has_body_come = len(data), False, False
        self._parse(data)
        if self._has_body_come:
            self._barren_bytes = 0
        elif not self._is_in_head:
            self._check_rest(len(data))
        if self._is_in_head and not self.transport.is_closing():
            # What came behind another request's head is counted from the next bytes on.
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
        """The parser leaves what follows to another protocol. It is a body all the same, or two
        would read this request differently.
        """
        lines = [b"%b: %b\r\n" % pair for pair in self._lengths]
        self._is_upgrade = False
        self.parser = httptools.HttpRequestParser(_RestOf(self))
        self._parse(b"POST / HTTP/1.1\r\nconnection: close\r\n%b\r\n%b" % (b"".join(lines), rest))

    def on_message_begin(self) -> None:
        """A head begins. What uvicorn does then is done once it is whole."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_in_head, self._is_between = True, False

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
        if limits.local_names_only and not _is_for_us(self.headers):
            self._refusal = MisdirectedRequestError()
            raise self._refusal
        self._head_bytes, self._has_head_ended, self._barren_bytes = 0, True, 0
        self._is_upgrade = bool(self.parser.should_upgrade())
        if self._is_upgrade:
            self._lengths = [pair for pair in self.headers if pair[0] in _LENGTHS]
        self.begin_request()
        self.headers = deque(maxlen=0)  # trailers are none
        if self._is_upgrade and self.cycle is not None:
            self.cycle.keep_alive = False

    def begin_request(self) -> None:
        """A request whose head is here goes uvicorn's way."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # which the scope has as well
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._has_body_come = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole, unless only the parser thinks so."""
        if not self._is_upgrade:
            self._is_between = True
            self.end_request()

    def on_last_message_complete(self) -> None:
        """A request is whole, and nothing that follows is read."""
        self._is_deaf = True
        self.end_request()

    def end_request(self) -> None:
        """A request is whole."""
        super().on_message_complete()

    def is_at_ease(self) -> bool:
        """Whether nothing stands before the answer of a request."""
        is_behind = self.cycle is not None and not self.cycle.response_complete
        is_stuck = self.flow.write_paused or self._is_surplus or self._is_deaf
        return not (is_behind or is_stuck or self.transport.is_closing())

    def begin_known_request(self) -> None:
        """A request whose head is known is here, all of it: the parser has not seen it."""
        self._head_until_s = self._idle_until_s = inf
        self._is_in_head, self._head_bytes, self._barren_bytes = False, 0, 0

    def eof_received(self) -> bool:  # type: ignore[override]
        """Nothing more comes. True: somebody may still wait for an answer."""
        cycle = self.cycle
        is_over = cycle is None or cycle.response_complete or cycle.more_body
        if is_over or self._is_in_head or self.scheme == "https":  # TLS ends both ways at once
            return False
        self._is_half_closed = bool(self.pipeline) or self.ask_whether_there()
        self._ask_at_s = self.loop.time()
        return self._is_half_closed

    def ask_whether_there(self) -> bool:
        """Who is gone answers bytes with a reset, which the next bytes find out. False: there are
        none to send.
        """
        if not self.cycle.response_started and self.has_interim_answers:
            self.transport.write(CONTINUE)
        return not self.cycle.response_started

    @property
    def has_interim_answers(self) -> bool:
        """Whether the client's HTTP knows answers that only say that another follows."""
        return bool(self.parser.get_http_version() != "1.0")

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        super().pause_writing()
        self._expect_to_be_read(self.loop.time())

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        self._stuck_until_s = inf

    def on_response_complete(self) -> None:
        """An answer is sent; its request may have more to say, which nobody reads. What uvicorn
        does then, without its timer.
        """
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()
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
        elif now_s > self._stuck_until_s:
            self._check_reading(now_s)
        elif self.transport.is_closing():
            if self._stuck_until_s == inf:
                self._expect_to_be_read(now_s)
        elif now_s > self._ask_at_s and not self.pipeline:
            self._ask_at_s = now_s + STILL_THERE_S
            self.ask_whether_there()

    def _expect_to_be_read(self, now_s: float) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._stuck_until_s = now_s + self.config.limits.stuck_s

    def _check_reading(self, now_s: float) -> None:
        before = self._unsent_bytes
        self._expect_to_be_read(now_s)
        if self._unsent_bytes > before - LEAST_TAKEN_BYTES:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """What uvicorn says of what it cannot parse, in our words."""
        self._refuse(self._refusal or MalformedRequestError())

    def _check_head(self, size_bytes: int) -> None:
        limits = self.config.limits
        if size_bytes > limits.header_limit_bytes or len(self.headers) > limits.max_headers:
            self._refuse(HeadersTooLargeError(limits))

    def _check_rest(self, size_bytes: int) -> None:
        """Extensions and trailers are bounded as heads are."""
        self._barren_bytes += size_bytes
        is_open = self.cycle is not None and self.cycle.more_body and not self._has_head_ended
        if is_open and self._barren_bytes > self.config.limits.header_limit_bytes:
            self._refuse(HeadersTooLargeError(self.config.limits))

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
            self.transport.write(_answer(error, self.told_of(error)))
        self.transport.close()

    def told_of(self, error: KvRouterError) -> object:
        """What the body of a refusal says."""
        return error.body()

    def _may_answer(self) -> bool:
        """Is nothing else to be said before? A request whose body is amiss gets no other answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        is_amiss = cycle.more_body and not cycle.response_started and not self.pipeline
        cycle.disconnected = cycle.disconnected or is_amiss
        return bool(is_amiss)


def _is_for_us(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return all(is_local_name(value) for name, value in headers if name == b"host")


def _answer(error: KvRouterError, told: object) -> bytes:
    body = msgspec.json.encode(told)
    status = HTTPStatus(error.http_status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
