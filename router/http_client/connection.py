"""One connection to a server: one request at a time, its answer as it comes.

    idle ─send─▶ waiting ─head─▶ answering ─end─▶ idle, or closed where it cannot be used again

Bytes that nobody has read yet are bounded: beyond, the socket is not read, and the server waits.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Any

import httptools

from router.http_client.errors import UpstreamError, UpstreamProblem
from router.http_client.known_answers import Head, KnownAnswers
from router.http_client.wait import Wait

MOST_UNREAD_BYTES = 256 * 1024
HEAD_LIMIT_BYTES = 64 * 1024
_NO_BODY = (204, 304)


class Answer:
    """An answer: its head, and its body as it comes. Has to be closed, whatever became of it."""

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: "Connection", head: Head) -> None:
        self._connection = connection
        self.status = head.status
        self.headers = head.headers

    def header(self, name: bytes) -> bytes | None:
        """A header's value, the first of them; the name in lower case."""
        for each, value in self.headers:
            if each == name:
                return value
        return None

    async def chunks(self, idle_s: float) -> AsyncIterator[bytes]:
        """The body, piece by piece. Raises UpstreamError if it breaks off, or says nothing for so
        long.
        """
        while chunk := await self._connection.next_chunk(idle_s):
            yield chunk

    async def next_chunk(self, idle_s: float) -> bytes:
        """The next piece; b"" at the end. Raises as `chunks` does."""
        return await self._connection.next_chunk(idle_s)

    async def read(self, limit_bytes: int, idle_s: float) -> bytes:
        """The whole body. Raises UpstreamError, also for one that is longer."""
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
        """It was read, or nobody wants the rest: then its connection is closed."""
        self._connection.finish()


class Connection(asyncio.Protocol):
    """See above. `is_reusable`: another request may be sent."""

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
        "_is_busy",
        "_is_complete",
        "_is_over",
        "_is_paused",
        "_is_until_close",
        "_known",
        "_loop",
        "_parser",
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
        known: KnownAnswers,
    ) -> None:
        """`finished` is called when nobody needs it for now, with whether it `is_reusable`."""
        self._known = known
        self.server = server
        self.is_reusable = False
        self.is_fresh = True
        """Nothing was answered on it yet."""
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
        self._answer: Answer | None = None
        self._has_begun = self._is_complete = self._is_over = self._is_until_close = False
        self._has_come = False  # something that somebody may wait for

    # ── What whoever asks calls ──────────────────────────────────────────────────────────────────

    async def ask(self, request: bytes, head_timeout_s: float) -> Answer:
        """Send a request, and wait for the head of its answer. Raises UpstreamError."""
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
        """Bytes of the body, all that are there; b"" at its end. Raises UpstreamError."""
        while not self._unread:
            if self._is_complete:
                return b""
            await self._something(idle_s)
        return self._taken()

    def take_whole(self, limit_bytes: int) -> bytes | None:
        """The body, if all of it is there, and no more than that; None: not yet."""
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
        """The answer was read, or nobody wants the rest: then the connection is closed."""
        if not self._is_busy:
            return
        self._is_busy = False
        self.is_fresh = False
        if not self._is_complete or not self.is_reusable or self._unread or self._is_sending():
            self.abort()
        self._finished(self)

    def _is_sending(self) -> bool:
        """Whether it was answered before the request was read, whose rest may never be."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        """Close it at once; the server sees that nobody listens any more."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def error(self, problem: UpstreamProblem, detail: str = "") -> UpstreamError:
        """What is wrong with this server."""
        return UpstreamError(self.server, problem, detail)

    def _something(self, timeout_s: float) -> Wait:
        """Until something came. Raises UpstreamError, here and to who waits."""
        if self._failure is not None:
            raise self._failure
        self._deadline_s = self._loop.time() + timeout_s
        if self._deadline_s < self._due_s:
            self._look_at(self._deadline_s)
        self._waiter = waiter = Wait(self._loop)
        return waiter

    def _look_at(self, due_s: float) -> None:
        """One timer serves many waits: it is set anew only where it would be late."""
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

    # ── What the event loop calls ────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It stands."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer; others are not wanted."""
        known = None if self._has_begun or not self._is_busy else self._known.find(data)
        if known is not None:
            self._answered(*known)
        elif not self._is_busy or self._is_complete:
            self._fail("malformed", "unexpected bytes")
        else:
            self._parse(data)
        if self._has_come or self._failure is not None:
            self._has_come = False
            self._wake()

    def _answered(self, head: Head, body: bytes) -> None:
        """All of an answer is here."""
        self._answer = Answer(self, head)
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
            self._known.remember(data, Head(self._answer.status, self._answer.headers))

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
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

    # ── What the parser calls ────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        """An answer begins; where one has ended already, nobody asked for another."""
        if self._is_complete:
            self._is_over = True
            self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, as it was written. What comes behind a body is none, and nobody reads it."""
        if self._answer is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """A head is whole; of those that only say that another follows, nothing is kept."""
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
            has_length |= name == b"content-length"
            has_chunks |= name == b"transfer-encoding"
        if has_length and has_chunks:
            self._fail("malformed", "both a length and a transfer encoding")
            return
        self._is_until_close = not (has_length or has_chunks or status in _NO_BODY)
        self.is_reusable = self._parser.should_keep_alive() and not self._is_until_close
        self._answer = Answer(self, Head(status, tuple(self._headers)))
        self._has_come = True

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._is_over:
            return
        self._unread.append(body)
        self._unread_bytes += len(body)
        self._has_come = True

    def on_message_complete(self) -> None:
        """An answer has ended, unless it was one that only says that another follows."""
        if self._answer is not None:
            self._is_complete = self._has_come = True

    def _fail(self, problem: UpstreamProblem, detail: str = "") -> None:
        if self._failure is None:
            self._failure = self.error(problem, detail)
        self.abort()

    def _wake(self) -> None:
        """To be called last: whoever waits goes on inside."""
        waiter, is_over = self._waiter, self._failure is not None or self._transport is None
        if waiter is None or not (self._answer is not None or is_over):
            return
        self._waiter = None
        is_all = is_over and not (self._unread or self._is_complete)
        waiter.go_on(self._failure if is_all else None)
