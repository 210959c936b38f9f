"""A connection whose hot requests are answered where they are parsed.

    bytes ─▶ head known? ──────────────────yes─┐
                 └─no─▶ parser ─▶ hot, whole? ─yes─▶ Front.answer_now ─▶ bytes
                                      └─no──▶ uvicorn: an ASGI task, as for every other request

A request whose body came with its head needs no task, no event and no dictionaries of ASGI: that
is as long as to choose a rank. Every request that is not so simple goes the long way: one that is
still coming, that has to wait, that expects 100-continue, whose caller does not read its answers.
Both ways lead through the same guard, ids, limits, handlers and refusals.
"""

import logging
from http import HTTPStatus
from typing import Any

from starlette.types import Message

from router.errors import KvRouterError
from router.http.answers import Answer, refusal
from router.http.exchange import Head, answered_by
from router.http.front import Front
from router.http.hot import HotRoute, Later
from router.process.connections import LimitedProtocol

log = logging.getLogger(__name__)

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_HEADER = b"%b: %b\r\n"
_WHOLE = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_OK = 200

MOST_UNSENT_BYTES = 65_536
"""Of one turn's answers to one caller; beyond, they are written at once."""


class HotProtocol(LimitedProtocol):
    """One connection to a `Front`.

    `_held`: the hot request that is being parsed; `_held_headers`, `_pieces`: what is there of it;
    `_later`: what became of it, where that was found out before. `_chunk`: the bytes that are being
    parsed, if a request begins with them. `_long_way`: uvicorn's part of the last one that had to
    wait. `_unsent`: answers that are written at the end of this turn.
    """

    app: Front
    _held: tuple[HotRoute, Head] | None = None
    _chunk = _unsent = b""
    _later: Later | None = None
    _held_headers: list[tuple[bytes, bytes]]
    _pieces: list[bytes]
    _long_way: Any = None
    _said_headers: list[tuple[bytes, bytes]] | None = None
    _ok_head = b""

    def data_received(self, data: bytes) -> None:
        """Bytes; a hot request that is not whole at their end goes the long way."""
        begins = self._is_between and self.is_at_ease()
        known = self.app.known_heads.find(data) if begins else None
        if known is not None:
            answer = self._answer(*known)
            if isinstance(answer, Answer):
                self._write(answer, keeps_alive=True)
                return
            self._later = answer  # uvicorn has to know the request, so it is parsed after all
        self._chunk = data if begins else b""
        super().data_received(data)
        self._chunk = b""
        if self._held is not None:
            self._go_long_way(self.app, b"".join(self._pieces), is_whole=False)

    def begin_request(self) -> None:
        """A head is whole: a hot one is held until its body is."""
        path, _, query = self.url.partition(b"?")
        method = self.parser.get_method()
        route = None
        is_clear = path.isascii() and b"%" not in path and b"#" not in self.url
        if is_clear and self.is_at_ease() and not self.expect_100_continue:
            route = self.app.hot_route(method.decode(), path.decode())
        if route is None:
            self.flush()
            super().begin_request()
        else:
            head = Head.of(method.decode(), path.decode(), query, self.headers)
            self._held, self._held_headers, self._pieces = (route, head), self.headers, []

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        if self._held is None:
            super().on_body(body)
        else:
            self._has_body_come = True
            self._pieces.append(body)

    def end_request(self) -> None:
        """A request is whole."""
        if self._held is None:
            super().end_request()
            return
        later, self._later = self._later, None
        answer = later or self._answer(*self._held, b"".join(self._pieces))
        if isinstance(answer, Answer):
            (route, head), self._held = self._held, None
            is_last = self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()
            if not is_last:
                self.app.known_heads.remember(self._chunk, route, head)
            self._write(answer, keeps_alive=not is_last)
        else:
            self._go_long_way(answered_by(answer), b"", is_whole=True)

    def _answer(self, route: HotRoute, head: Head, body: bytes) -> Answer | Later:
        try:
            return self.app.answer_now(route, head, body, self._receive)
        except Exception:  # a bug of ours; the connection, and others' requests on it, go on
            log.exception("a request failed")
            return refusal(KvRouterError("internal error"))

    def _go_long_way(self, app: Any, body: bytes, *, is_whole: bool) -> None:
        """Hand what is held over to uvicorn, for `app` to answer it."""
        self.flush()
        self._held, self._pieces = None, []
        front, self.app = self.app, app
        trailers, self.headers = self.headers, self._held_headers
        try:
            super().begin_request()
        finally:
            self.app = front
            self.headers = trailers
        cycle = self._long_way = self.cycle
        cycle.body += body
        cycle.more_body = not is_whole
        if body or is_whole:
            cycle.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Nothing more comes; what is answered is written first."""
        self.flush()
        return super().eof_received()

    def _refuse(self, error: KvRouterError) -> None:
        self.flush()
        super()._refuse(error)

    async def _receive(self) -> Message:
        """What comes on the long way of the request that is being answered."""
        message: Message = await self._long_way.receive()
        return message

    def _write(self, answer: Answer, *, keeps_alive: bool) -> None:
        """What `send_answer` sends, in one piece."""
        is_known = answer.status == _OK and self._said_headers is self.server_state.default_headers
        head = self._ok_head if is_known else self._head(answer.status)
        for each in answer.headers:
            head += _HEADER % each
        if not keeps_alive:
            head += b"connection: close\r\n"
        if not self._unsent:
            self.app.turn.flush_later(self.flush, self.loop)
        self._unsent += _WHOLE % (head, len(answer.body), answer.body)
        self.server_state.total_requests += 1
        if keeps_alive:
            self.be_idle(self.config.limits.keep_alive_s)
        if not keeps_alive or len(self._unsent) > MOST_UNSENT_BYTES:
            self.flush()
        if not keeps_alive:
            self.transport.close()

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._unsent and not self.transport.is_closing():
            self.transport.write(self._unsent)
        self._unsent = b""

    def shutdown(self) -> None:
        """The server ends: what is answered is written first."""
        self.flush()
        super().shutdown()

    def _head(self, status: int) -> bytes:
        """The beginning of an answer; the same for every good one of a second."""
        headers = self.server_state.default_headers
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        head = b"".join((line, *(_HEADER % each for each in headers)))
        if status == _OK:
            self._said_headers, self._ok_head = headers, head
        return head
