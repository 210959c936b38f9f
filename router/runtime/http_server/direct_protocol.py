"""A connection that serves hot requests below ASGI.

    bytes ─▶ head known? ──────────yes───────────┐
                 └─no─▶ parser ─▶ hot? ─yes─▶ Exchange ─whole─▶ handler ─▶ response, or a task
                                   └─no──▶ uvicorn: an ASGI task, as for every other request

A request that is answered at once needs no task, no event and no ASGI dictionaries, which cost as
much time as the selection of a rank. Requests of a connection are answered in order.
"""

import asyncio
import logging
from collections.abc import Coroutine
from math import inf
from typing import Any, Protocol
from urllib.parse import unquote

import httptools

from router.errors import KvRouterError
from router.runtime.http_server.admission import Admission
from router.runtime.http_server.exchange import (
    TRACE_NAME,
    Exchange,
    FirstLines,
    HotRoute,
    RequestHead,
    RequestHeads,
    split,
)
from router.runtime.http_server.head_cache import Recent
from router.runtime.http_server.limited_connection import CONTINUE, LimitedProtocol
from router.runtime.http_server.wait import Wait
from router.runtime.http_server.write_batch import BatchedTransport, WriteBatch
from router.runtime.process.errors import BodyTimeoutError
from router.runtime.process.request_ids import ANSWERED, RequestIds

log = logging.getLogger(__name__)

_COMMENT = b":\n\n"
"""An event that stream clients ignore."""


class HotService(Protocol):
    """The service of hot requests, the same for all connections of a server."""

    admission: Admission
    heads: RequestHeads
    lines: FirstLines
    writes: WriteBatch

    def find(self, method: str, path: str) -> HotRoute | None:
        """Return the route of a request, or None if the application serves it."""
        ...

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """Answer an admitted request, at once or by the returned coroutine. May raise."""
        ...

    def refused(self, exchange: Exchange, error: KvRouterError) -> None:
        """Count a refusal, before it is sent."""
        ...

    def abandoned(self, exchange: Exchange) -> None:
        """Count a request that ends without a response, because its client has disconnected."""
        ...

    def error_reply(self, error: KvRouterError) -> tuple[int, object]:
        """Return the status and the body of an error response."""
        ...


class DirectProtocol(LimitedProtocol):
    """One connection. Pipelined requests wait for earlier ones.

    `_recent`: the heads that were found last. `_turn`: the request being answered: an exchange, or
    uvicorn's cycle. `_chunk`: the bytes being parsed, if a request begins with them. `_owed_bytes`:
    the rest of a body whose head was found by its bytes; it is read without the parser.
    `_body_until_s`: deadline of the body being received.
    `_task`: the task that runs the handlers that wait, in order; it waits for the `_next` exchange
    in `_rest`.
    """

    service: HotService
    pipeline: Any
    _batched: BatchedTransport
    _turn: object = None
    _chunk = b""
    _owed_bytes: int
    _body_until_s = inf
    _task: asyncio.Task[None] | None = None
    _rest: Wait | None = None
    _next: Exchange | None = None
    _is_going_on = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection."""
        service = self.config.hot
        assert service is not None
        self._batched = BatchedTransport(transport, service.writes, self.loop)
        super().connection_made(self._batched)
        self.service = service
        self.admission = service.admission
        self.lines = service.lines
        self._find = service.heads.find
        self._owed_bytes = 0
        self._recent: Recent[RequestHead] = {}

    # ── The request ──────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; a cached head is not parsed."""
        if self._owed_bytes:
            self._take_owed(data)
            return
        is_behind = self._turn is not None or self.pipeline or self.flow.write_paused
        begins = self._is_between and not is_behind and not self.transport.is_closing()
        found = self._find(data, self._recent) if begins else None
        if found is None:
            self._chunk = data if begins else b""
            super().data_received(data)
            self._chunk = b""
            return
        head, path_id, request_id, trace, length_bytes, body = found
        if self._is_in_head:
            self._is_in_head, self._head_bytes = False, 0
        ids = RequestIds()
        if request_id:
            ids.given = request_id.decode()
        owed_bytes = length_bytes - len(body)
        self.cycle = self._turn = exchange = Exchange(
            self, head, path_id.decode(), ids, length_bytes, body, owed_bytes > 0
        )
        if trace:
            ids.traceparent = trace.decode()
            exchange.traces = ((TRACE_NAME, trace),)
        if owed_bytes:
            self._owed_bytes, self._is_between = owed_bytes, False
            self._await_body(exchange)
        else:
            self._answer(exchange, is_last=True)

    def _take_owed(self, data: bytes) -> None:
        """Handle bytes after a cached head, which begin with more of its body."""
        exchange, rest = self.cycle, b""
        if len(data) > self._owed_bytes:
            data, rest = data[: self._owed_bytes], data[self._owed_bytes :]
        self._owed_bytes -= len(data)
        self._receive(exchange, data)
        if self._owed_bytes:
            return
        self._is_between = True
        self._end_body(exchange, is_last=not rest)
        if rest and not self.transport.is_closing():
            self.data_received(rest)

    def begin_request(self) -> None:
        """Begin a request with a whole head."""
        chunk, self._chunk = self._chunk, b""
        method = self.parser.get_method().decode()
        path, query = _target(self.url)
        route = self.service.find(method, path)
        if route is None:
            super().begin_request()
            return
        shared, values = split(self.headers)
        head, path_id = self.service.heads.parsed(route, method, query, shared), route.id_in(path)
        exchange = Exchange(self, head, path_id, values.ids(), values.length_bytes)
        exchange.has_chunks = self.parser.get_http_version() != "1.0"
        keeps_alive = exchange.has_chunks and self.parser.should_keep_alive()
        exchange.keep_alive = keeps_alive and not self._is_upgrade
        exchange.expects_continue = self.expect_100_continue
        exchange.traces = values.traces
        self.cycle = exchange
        if not self.can_answer_directly():
            if not self.transport.is_closing():
                self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))
            return
        self._turn = exchange
        self._await_body(exchange)
        is_usual = exchange.keep_alive and not exchange.expects_continue
        if chunk and is_usual and not exchange.response_complete:
            self.service.heads.remember(chunk, head, path_id, values)

    def can_answer_directly(self) -> bool:
        """Return whether a request can be answered at once.

        False if another response is due first, or if the connection is slow, surplus or closing.
        """
        is_behind = self._turn is not None or self.pipeline or self.flow.write_paused
        return not (is_behind or self._is_surplus or self._is_deaf or self.transport.is_closing())

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body."""
        if isinstance(self.cycle, Exchange):
            self._has_body_come = True
            self._receive(self.cycle, body)
        else:
            super().on_body(body)

    def _receive(self, exchange: Exchange, piece: bytes) -> None:
        if exchange.response_complete:
            return
        if exchange.received:
            exchange.receive(piece)
        else:
            exchange.received = piece  # most bodies arrive whole
        if self._turn is exchange:
            try:
                self.admission.hold(exchange)
            except KvRouterError as error:
                self._refuse_exchange(exchange, error)

    def end_request(self) -> None:
        """End a request."""
        if isinstance(self.cycle, Exchange):
            self._end_body(self.cycle)
        else:
            super().end_request()

    def _end_body(self, exchange: Exchange, *, is_last: bool = False) -> None:
        exchange.more_body = False
        if self._turn is exchange:
            self._body_until_s = inf
            self._answer(exchange, is_last=is_last)
        elif exchange.response_complete:  # before its body came
            self.end_response()

    # ── Turns ────────────────────────────────────────────────────────────────────────────────────

    def _await_body(self, exchange: Exchange) -> None:
        """Admit the request whose turn it is, and wait for the rest of its body."""
        admission = self.admission
        try:
            admission.admit(exchange)
        except KvRouterError as error:
            self._refuse_exchange(exchange, error)
            return
        admission.enter(exchange)
        self._head_until_s = self._idle_until_s = inf
        self._body_until_s = self.loop.time() + admission.limits.body_timeout_s
        if exchange.expects_continue:
            self.transport.write(CONTINUE)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._turn = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Handle the end of a response of the application."""
        self._turn = None
        super().on_response_complete()

    def _end(self, exchange: Exchange) -> None:
        """End a request; the next one follows."""
        if exchange.is_counted:
            self.admission.leave(exchange)
        if exchange.received:
            exchange.received = b""  # now; the cycle with its connection keeps the exchange
        self.end_response()
        if self._turn is exchange:
            self._turn = None
            if self.pipeline or self.flow.read_paused:
                self.go_on()

    def go_on(self) -> None:
        """Begin queued requests, until one has to wait."""
        if self._is_going_on or self.transport.is_closing():
            return
        self._is_going_on = True
        while self.pipeline and self._turn is None and not self.flow.write_paused:
            cycle, app = self.pipeline.pop()
            if not isinstance(cycle, Exchange):
                self._start_asgi_task(cycle, app)
                continue
            self._turn = cycle
            if cycle.more_body:
                self._await_body(cycle)
            else:
                self._answer(cycle)
        self._is_going_on = False
        if not (self.pipeline or self.transport.is_closing()):
            self.flow.resume_reading()

    def resume_writing(self) -> None:
        """Go on with queued requests: the client reads again."""
        super().resume_writing()
        self.go_on()

    # ── Answers ──────────────────────────────────────────────────────────────────────────────────

    def _answer(self, exchange: Exchange, *, is_last: bool = False) -> None:
        """Answer a complete request. `is_last`: this is the last step of a callback of the loop."""
        token = ANSWERED.set(exchange.ids)
        try:
            if not exchange.is_counted:
                self.admission.admit(exchange)
            later = self.service.answer(exchange)
        except KvRouterError as error:
            self._refuse_exchange(exchange, error)
        except Exception:  # a bug; other requests continue
            log.exception("request failed: internal error")
            self._refuse_exchange(exchange, KvRouterError("internal error"))
        else:
            if later is None:
                self._end(exchange)
            else:
                if not exchange.is_counted:
                    self.admission.enter(exchange)
                    self._head_until_s = self._idle_until_s = inf
                exchange.later = later
                self._run(exchange, is_last=is_last)
        finally:
            ANSWERED.reset(token)

    def _refuse_exchange(self, exchange: Exchange, error: KvRouterError) -> None:
        """Refuse a request, and end it."""
        self._body_until_s = inf
        token = ANSWERED.set(exchange.ids)
        self.service.refused(exchange, error)
        ANSWERED.reset(token)
        exchange.refuse(error)
        if self.admission.overload.is_on:
            self._batched.flush()  # an iteration is long then
        self._end(exchange)

    def _run(self, exchange: Exchange, *, is_last: bool) -> None:
        self._next = exchange
        if self._task is None:
            self._task = self.loop.create_task(self._answer_all())
        elif is_last:
            self._wake()
        elif self._rest is not None:
            self.loop.call_soon(self._wake)

    def _wake(self) -> None:
        """Resume the task, which runs inside this call, so this must be the last step."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.go_on()

    async def _answer_all(self) -> None:
        """Finish all exchanges in one task: a new task costs half as much as a whole request."""
        while True:
            exchange, self._next = self._next, None
            if exchange is not None:
                await self._finish(exchange)
            elif self.transport.is_closing():
                return
            else:
                self._rest = Wait(self.loop)
                await self._rest

    async def _finish(self, exchange: Exchange) -> None:
        assert self._task is not None
        assert exchange.later is not None
        if exchange.disconnected and exchange.head.route.ends_with_client:
            exchange.later.close()
            self._abandon(exchange)
            return
        exchange.task = self._task
        self.tasks.add(exchange.task)
        ANSWERED.set(exchange.ids)
        try:
            await exchange.later
        except KvRouterError as error:
            self._refuse_exchange(exchange, error)
        except asyncio.CancelledError:
            self._abandon(exchange)
            if not exchange.disconnected:
                raise
        except Exception:  # a bug; other requests continue
            log.exception("request failed: internal error")
            self._refuse_exchange(exchange, KvRouterError("internal error"))
        else:
            self._end(exchange)
        finally:
            self.tasks.discard(self._task)
            if not (exchange.response_complete or self.transport.is_closing()):
                self.transport.close()  # no code completes that response

    def _abandon(self, exchange: Exchange) -> None:
        self.service.abandoned(exchange)
        self._end(exchange)

    def error_reply(self, error: KvRouterError) -> tuple[int, object]:
        """Return the status and the body of an error response."""
        return self.service.error_reply(error)

    # ── The connection ───────────────────────────────────────────────────────────────────────────

    def check_patience(self, now_s: float) -> None:
        """Apply the timeouts of the connection, including that of a body."""
        if now_s > self._body_until_s:
            self._body_until_s = inf
            if isinstance(self._turn, Exchange):
                patience_s = self.admission.limits.body_timeout_s
                self._refuse_exchange(self._turn, BodyTimeoutError(patience_s))
        super().check_patience(now_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection; requests without a whole body are abandoned."""
        super().connection_lost(exc)
        exchange = self._turn
        if isinstance(exchange, Exchange) and not exchange.response_complete:
            exchange.disconnect()
            if exchange.later is None:
                self._abandon(exchange)
            elif exchange.task is not None and exchange.head.route.ends_with_client:
                exchange.task.cancel()
        if self._rest is not None and self._next is None and self._task is not None:
            self._task.cancel()

    def send_keepalive(self) -> bool:
        """Send a comment to a half-closed client of a stream, otherwise as the base class."""
        exchange = self.cycle
        if not (isinstance(exchange, Exchange) and exchange.response_started):
            return super().send_keepalive()
        exchange.write(_COMMENT)
        return True


def _target(url: bytes) -> tuple[str, bytes]:
    """Return the decoded path of a request target, and its query."""
    if url.startswith(b"/") and b"#" not in url:
        raw, _, query = url.partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        raw, query = parsed.path or b"", parsed.query or b""
    path = raw.decode("ascii")
    return (unquote(path) if "%" in path else path), query
