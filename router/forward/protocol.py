"""A connection whose completions are answered below ASGI.

    bytes ─▶ head known? ──────────yes────────┐
                 └─no─▶ parser ─▶ a completion? ─yes─▶ Call ─whole─▶ a task of Completions.answer
                                       └─no──▶ uvicorn: an ASGI task, as for every other request

A client that hangs up cancels its task, and with it the engine's work.
"""

import asyncio
from collections.abc import Sequence
from math import inf
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools

from router.body_errors import BodyTimeoutError
from router.errors import KvRouterError
from router.forward.bodies import PATHS
from router.forward.call import Call, refusal
from router.forward.completions import Completions
from router.forward.known_calls import KnownCalls
from router.http_client.wait import Wait
from router.process.connections import CONTINUE, LimitedProtocol
from router.process.request_ids import RequestIds

_SAYS_NOTHING = b":\n\n"
"""An event that clients of streams ignore."""


class ForwardProtocol(LimitedProtocol):
    """One connection. Requests wait in uvicorn's pipeline for those before them.

    `_body_until_s`: until then the body that is being received has to be whole. `_chunk`: the bytes
    that are being parsed, if a request begins with them. `_answering`: the task that answers one
    call after the other; it waits for the `_next` one in its `_rest`.
    """

    app: Any
    completions: Completions
    known_calls: KnownCalls
    _body_until_s = inf
    _chunk = b""
    _answering: asyncio.Task[None] | None = None
    _rest: Wait | None = None
    _next: Call | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection; `completions` answers its calls."""
        super().connection_made(transport)
        self.completions = self.app.completions
        self.known_calls = self.completions.known_calls

    def data_received(self, data: bytes) -> None:
        """Bytes; a head that is known is not parsed."""
        begins = self._is_between and self.is_at_ease()
        found = self.known_calls.find(data) if begins else None
        if found is None:
            self._chunk = data if begins else b""
            super().data_received(data)
            self._chunk = b""
            return
        (path, headers, words), request_id, body = found
        self.begin_known_request()
        ids = RequestIds(request_id.decode("ascii") or None)
        call = Call(self, path, headers, keep_alive=True, ids=ids, known_words=words)
        self.cycle = call
        call.receive(body)
        call.more_body = False
        self._take_turn(call)
        if not call.response_complete:
            self._start(call, is_last=True)

    @property
    def said_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """What every answer says."""
        return self.server_state.default_headers

    def begin_request(self) -> None:
        """A head is whole."""
        path = PATHS.get(_path_of(self.url))
        if path is None or self.parser.get_method() != b"POST":
            super().begin_request()
            return
        is_old = self.parser.get_http_version() == "1.0"
        keep_alive = not is_old and self.parser.should_keep_alive()
        call = Call(self, path, self.headers, keep_alive=keep_alive, has_chunks=not is_old)
        before, self.cycle = self.cycle, call
        if before is None or before.response_complete:
            self._take_turn(call)
            if self.expect_100_continue and not call.response_complete:
                self.transport.write(CONTINUE)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((call, self.app))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        call = self.cycle
        if not isinstance(call, Call):
            super().on_body(body)
            return
        self._has_body_come = True
        if not call.response_complete:
            call.receive(body)
            if call.is_turn:
                self._hold(call)

    def _hold(self, call: Call) -> None:
        try:
            self.completions.hold(call)
        except KvRouterError as error:
            self.completions.refuse(call, error)

    def end_request(self) -> None:
        """A request is whole."""
        call = self.cycle
        if not isinstance(call, Call):
            super().end_request()
            return
        call.more_body = False
        self._body_until_s = inf
        if call.is_turn and not call.response_complete:
            is_usual = call.keep_alive and not self.expect_100_continue
            message = self._chunk if is_usual else b""
            call.known_words = self.known_calls.words_under(call.path, call.headers, message)
            self._start(call)

    def on_response_complete(self) -> None:
        """The next request's turn."""
        self._body_until_s = inf
        super().on_response_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if not isinstance(cycle, Call):
            super()._start_asgi_task(cycle, app)
            return
        self._take_turn(cycle)
        if not (cycle.more_body or cycle.response_complete):
            self._start(cycle)

    def check_patience(self, now_s: float) -> None:
        """Also with a body."""
        if now_s > self._body_until_s:
            self._body_until_s = inf
            if isinstance(self.cycle, Call) and not self.cycle.response_complete:
                patience_s = self.completions.config.body_timeout_s
                self.completions.refuse(self.cycle, BodyTimeoutError(patience_s))
        super().check_patience(now_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: nobody waits for an answer."""
        super().connection_lost(exc)
        waiting = [cycle for cycle, _ in self.pipeline]
        for call in (self.cycle, *waiting):
            if isinstance(call, Call) and not call.response_complete:
                call.disconnected = True
                self.completions.gone(call)
        if self._rest is not None and self._answering is not None:
            self._answering.cancel()

    def _take_turn(self, call: Call) -> None:
        """Its answer is the next on this connection."""
        call.is_turn, config = True, self.completions.config
        try:
            self.completions.admit(call)
            self.completions.hold(call)
        except KvRouterError as error:
            self.completions.refuse(call, error)
        else:
            if call.more_body:
                self._body_until_s = self.loop.time() + config.body_timeout_s

    def _start(self, call: Call, *, is_last: bool = False) -> None:
        """`is_last`: there is nothing more to do in this callback of the loop."""
        self._next = call
        if self._answering is None:
            self._answering = self.loop.create_task(self._answer_all())
        elif is_last:
            self._go_on()
        elif self._rest is not None:
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """To be called last: the next call is answered inside."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.go_on()

    async def _answer_all(self) -> None:
        """One task for all calls: a new one costs as much as half of the rest of a request."""
        while not self.transport.is_closing():
            call, self._next = self._next, None
            if call is not None:
                await self._answer(call)
            else:
                self._rest = Wait(self.loop)
                await self._rest

    async def _answer(self, call: Call) -> None:
        assert self._answering is not None
        call.task = self._answering
        self.tasks.add(call.task)
        try:
            await self.completions.answer(call)
        finally:
            self.tasks.discard(call.task)
            if not (call.response_complete or self.transport.is_closing()):
                self.transport.close()  # nobody will end that answer

    def ask_whether_there(self) -> bool:
        """A stream that has begun is gone on with, by what says nothing."""
        call = self.cycle
        if not (isinstance(call, Call) and call.response_started):
            return super().ask_whether_there()
        call.write(_SAYS_NOTHING)
        return True

    def told_of(self, error: KvRouterError) -> object:
        """What the body of a refusal says, also of what is no request."""
        return refusal(error)


def _path_of(url: bytes) -> bytes:
    """The path that a request line asks for, in any of its forms."""
    if not url.startswith(b"/"):
        url = httptools.parse_url(url).path or b""
    path = url.partition(b"?")[0]
    return unquote_to_bytes(path) if b"%" in path else path
