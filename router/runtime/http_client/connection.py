"""A client connection: one request at a time, its response as it arrives.

    idle ─send─▶ waiting ─head─▶ answering ─end─▶ idle, or closed if it cannot be used again

Unread bytes are bounded: beyond the limit the socket is not read, and the server has to wait.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Any, Literal, TypeAlias

import httptools
from msgspec import Struct

from router.errors import KvRouterError
from router.runtime.http_server.head_cache import HeadCache, Recent
from router.runtime.http_server.wait import Wait

UpstreamProblem: TypeAlias = Literal[
    "refused", "connect timeout", "timeout", "closed", "cut off", "malformed", "too large", "busy"
]


class UpstreamError(KvRouterError):
    """A server did not respond as HTTP requires. `problem`: the kind of failure.

    `closed`: the connection ended before the first byte of a response; `cut off`: within one.
    """

    code = "upstream_failed"
    http_status = 502

    def __init__(self, server: str, problem: UpstreamProblem, detail: str = "") -> None:
        super().__init__(f"{server}: {problem}{f': {detail}' if detail else ''}")
        self.server = server
        self.problem = problem
        self.detail = detail


class NeverSentError(UpstreamError):
    """No connection could be opened, so a retry, here or elsewhere, repeats nothing."""

    code = "upstream_unreachable"
    http_status = 503


MOST_HEADS = 16
"""Limit of the cached heads of one server's responses."""

_ID, _TRACE = b"x-request-id", b"traceparent"
_LENGTH = b"content-length"


class ResponseHead(Struct, frozen=True):
    """The head of a response, without the length of its body; headers are named in lower case."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]

    def with_ids(self, request_id: bytes, trace: bytes) -> "ResponseHead":
        """Return a copy of a head with another id and trace in place of its own, if it has them."""
        own = {_ID: request_id, _TRACE: trace}
        return ResponseHead(
            self.status, tuple((name, own.get(name, value)) for name, value in self.headers)
        )


MOST_UNREAD_BYTES = 256 * 1024
HEAD_LIMIT_BYTES = 64 * 1024
_NO_BODY = (204, 304)


class UpstreamResponse:
    """A response: its head, and its body as it arrives. It must be closed in every case."""

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: "Connection", head: ResponseHead) -> None:
        self._connection = connection
        self.status = head.status
        self.headers = head.headers

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, or None; `name` in lower case."""
        for each, value in self.headers:
            if each == name:
                return value
        return None

    async def chunks(self, idle_s: float) -> AsyncIterator[bytes]:
        """Yield the pieces of the body.

        Raises UpstreamError if the body is cut off, or if no data arrives for `idle_s`.
        """
        while chunk := await self._connection.next_chunk(idle_s):
            yield chunk

    async def next_chunk(self, idle_s: float) -> bytes:
        """Return the next piece, b"" at the end. Raises as `chunks` does."""
        return await self._connection.next_chunk(idle_s)

    async def read(self, limit_bytes: int, idle_s: float) -> bytes:
        """Return the whole body. Raises UpstreamError, also for a body above `limit_bytes`."""
        whole = self._connection.take_whole(limit_bytes)
        if whole is not None:
            return whole
        parts, size_bytes = [], 0
        while chunk := await self._connection.next_chunk(idle_s):
            size_bytes += len(chunk)
            if size_bytes > limit_bytes:
                raise self._connection.error("too large", f"more than {limit_bytes} bytes")
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Release the connection; it is closed if the response was not read to its end."""
        self._connection.finish()


class Connection(asyncio.Protocol):
    """A client connection, used for one request at a time.

    `is_reusable`: another request may be sent.
    """

    __slots__ = (
        "_answer",
        "_deadline_s",
        "_due_s",
        "_failure",
        "_finished",
        "_has_begun",
        "_has_come",
        "_head_bytes",
        "_headers",
        "_heads",
        "_is_busy",
        "_is_complete",
        "_is_over",
        "_is_paused",
        "_is_until_close",
        "_loop",
        "_parser",
        "_recent",
        "_timer",
        "_transport",
        "_unread",
        "_unread_bytes",
        "_waiter",
        "is_fresh",
        "is_reusable",
        "server",
    )

    def __init__(
        self,
        server: str,
        loop: asyncio.AbstractEventLoop,
        finished: Callable[["Connection"], None],
        heads: HeadCache[ResponseHead],
    ) -> None:
        """Create a connection. `finished`: called when the connection is released.

        `is_reusable` then shows whether it can be used again.
        """
        self._heads = heads
        self._recent: Recent[ResponseHead] = {}
        self.server = server
        self.is_reusable = False
        self.is_fresh = True
        """True until the first response on this connection is finished."""
        self._loop = loop
        self._finished = finished
        self._transport: asyncio.Transport | None = None
        self._failure: UpstreamError | None = None
        self._waiter: Wait | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = self._due_s = inf
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._is_paused = False
        self._is_busy = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._begin()

    def _begin(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._answer: UpstreamResponse | None = None
        self._has_begun = self._is_complete = self._is_over = self._is_until_close = False
        self._has_come = False  # something that a task may wait for

    # ── Called by users of the connection ────────────────────────────────────────────────────────

    async def send(self, request: bytes, head_timeout_s: float) -> UpstreamResponse:
        """Send a request, and wait for the head of its response. Raises UpstreamError."""
        self._is_busy, self.is_reusable = True, False
        if self._failure is not None or self._transport is None:
            raise self._failure or self.error("closed")
        if not self.is_fresh:
            self._begin()
        self._transport.write(request)
        while self._answer is None:
            await self._something(head_timeout_s)
        return self._answer

    async def next_chunk(self, idle_s: float) -> bytes:
        """Return all received bytes of the body, b"" at its end. Raises UpstreamError."""
        while not self._unread:
            if self._is_complete:
                return b""
            await self._something(idle_s)
        return self._taken()

    def take_whole(self, limit_bytes: int) -> bytes | None:
        """Return the whole body if it has arrived and is within the limit, otherwise None."""
        is_whole = self._is_complete and self._unread_bytes <= limit_bytes
        return self._taken() if is_whole else None

    def _taken(self) -> bytes:
        chunk = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return chunk

    def finish(self) -> None:
        """Release the connection; close it unless the response was read to its end."""
        if not self._is_busy:
            return
        self._is_busy = False
        self.is_fresh = False
        if not self._is_complete or not self.is_reusable or self._unread or self._is_sending():
            self.abort()
        self._finished(self)

    def _is_sending(self) -> bool:
        """Return whether unsent bytes remain: the response came before the request was read."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        """Close the connection at once; the server sees a reset."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def error(self, problem: UpstreamProblem, detail: str = "") -> UpstreamError:
        """Return an error of this server."""
        return UpstreamError(self.server, problem, detail)

    def _something(self, timeout_s: float) -> Wait:
        """Return a wait for the next data. Raises UpstreamError, also from the wait."""
        if self._failure is not None:
            raise self._failure
        self._deadline_s = self._loop.time() + timeout_s
        if self._deadline_s < self._due_s:
            self._look_at(self._deadline_s)
        self._waiter = waiter = Wait(self._loop)
        return waiter

    def _look_at(self, due_s: float) -> None:
        """Set the timer. One timer serves many waits: it is replaced only if it would be late."""
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._look)

    def _look(self) -> None:
        self._timer, self._due_s = None, inf
        if self._waiter is None:
            return
        if self._loop.time() >= self._deadline_s:
            self._fail("timeout", "no answer in time")
            self._wake()
        else:
            self._look_at(self._deadline_s)

    # ── Called by the event loop ─────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Store the transport of the established connection."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a response; other bytes are an error."""
        is_first = self._is_busy and not self._has_begun
        known = self._heads.find(data, self._recent) if is_first else None
        if known is not None and known[4] == len(known[5]):
            head, _, request_id, trace, _, body = known
            self._answered(head.with_ids(request_id, trace) if request_id or trace else head, body)
        elif not self._is_busy or self._is_complete:
            self._fail("malformed", "unexpected bytes")
        else:
            self._parse(data)
        if self._has_come or self._failure is not None:
            self._has_come = False
            self._wake()

    def _answered(self, head: ResponseHead, body: bytes) -> None:
        """Handle a complete response with a cached head."""
        self._answer = UpstreamResponse(self, head)
        self._has_begun = self._is_complete = self.is_reusable = self._has_come = True
        if body:
            self.on_body(body)

    def _parse(self, data: bytes) -> None:
        is_first, self._has_begun = not self._has_begun, True
        if self._answer is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("malformed", str(error))
        except httptools.HttpParserUpgrade:
            self._fail("malformed", "an unexpected upgrade")
        if self._answer is None and self._head_bytes > HEAD_LIMIT_BYTES:
            self._fail("too large", f"a head of more than {HEAD_LIMIT_BYTES} bytes")
        if self._unread_bytes > MOST_UNREAD_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()
        if is_first and self._is_complete and self.is_reusable and self._answer is not None:
            headers = self._answer.headers
            ids = [value for name, value in headers if name == _ID]
            traces = [value for name, value in headers if name == _TRACE]
            if len(ids) < 2 and len(traces) < 2:
                head = ResponseHead(self._answer.status, headers)
                own = (b"", b"".join(ids), b"".join(traces))
                self._heads.remember(data, head, own)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self.is_reusable = False
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if self._is_until_close and exc is None:
            self._is_complete = True
        if not self._is_complete or self._failure is None:
            problem: UpstreamProblem = "cut off" if self._has_begun else "closed"
            self._failure = self._failure or self.error(problem, str(exc or ""))
        self._wake()

    # ── Called by the parser ─────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        """Begin a response; one that was not requested makes the connection unusable."""
        if self._is_complete:
            self._is_over = True
            self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; trailers are ignored."""
        if self._answer is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Finish a head; heads of interim responses are dropped."""
        status = self._parser.get_status_code()
        if self._is_over:
            return
        if status < 200:
            self._headers = []
            if status < 100:
                self._fail("malformed", f"status {status}")
            return
        has_length = has_chunks = False
        for name, _ in self._headers:
            has_length |= name == _LENGTH
            has_chunks |= name == b"transfer-encoding"
        if has_length and has_chunks:
            self._fail("malformed", "both a length and a transfer encoding")
            return
        self._is_until_close = not (has_length or has_chunks or status in _NO_BODY)
        self.is_reusable = self._parser.should_keep_alive() and not self._is_until_close
        headers = tuple(pair for pair in self._headers if pair[0] != _LENGTH)
        self._answer = UpstreamResponse(self, ResponseHead(status, headers))
        self._has_come = True

    def on_body(self, body: bytes) -> None:
        """Store a piece of the body."""
        if self._is_over:
            return
        self._unread.append(body)
        self._unread_bytes += len(body)
        self._has_come = True

    def on_message_complete(self) -> None:
        """Finish a response, unless it is an interim response."""
        if self._answer is not None:
            self._is_complete = self._has_come = True

    def _fail(self, problem: UpstreamProblem, detail: str = "") -> None:
        """Fail, and ignore all that follows in the same bytes, such as another response."""
        self._is_over = True
        if self._failure is None:
            self._failure = self.error(problem, detail)
        self.abort()

    def _wake(self) -> None:
        """Wake the waiting task, which resumes inside this call, so this must be the last step."""
        waiter, is_over = self._waiter, self._failure is not None or self._transport is None
        if waiter is None or not (self._answer is not None or is_over):
            return
        self._waiter = None
        is_all = is_over and not (self._unread or self._is_complete)
        waiter.go_on(self._failure if is_all else None)
