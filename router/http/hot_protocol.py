"""A connection whose hot requests are answered where they are parsed.

    bytes ─▶ uvicorn's parser ─▶ hot, and whole? ─yes─▶ Front.answer_now ─▶ bytes
                                               └─no──▶ an ASGI task, as for every other request

A request whose body came with its head needs no task, no event and no dictionaries of ASGI: that
is as long as to choose a rank. Every request that is not so simple goes the long way: one that is
still coming, that has to wait, that expects 100-continue, whose caller does not read its answers.
Both ways lead through the same guard, ids, limits, handlers and refusals.
"""

import logging
from http import HTTPStatus
from typing import Any

from router.errors import KvRouterError
from router.http.answers import Answer, refusal
from router.http.exchange import answered_by
from router.http.front import Front
from router.http.hot import HotRoute
from router.process.connections import LimitedProtocol

log = logging.getLogger(__name__)

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_TYPE_AND_LENGTH = b"content-type: application/json\r\ncontent-length: %d\r\n"


class HotProtocol(LimitedProtocol):
    """One connection to a `Front`."""

    app: Front
    _is_parsing = False
    _held: tuple[Any, HotRoute] | None = None

    def data_received(self, data: bytes) -> None:
        """Parse bytes; then answer the hot request among them, and those behind it."""
        self._is_parsing = True
        super().data_received(data)
        while self._held is not None:
            (cycle, route), self._held = self._held, None
            if cycle.more_body:
                self._start_task(cycle, self.app)
            elif not cycle.disconnected:
                self._answer(cycle, route)
        self._is_parsing = False

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """A request's turn has come; its head is here. A hot one is held until its bytes are."""
        is_plain = self._is_parsing and not self.expect_100_continue and not self.flow.write_paused
        route = self.app.hot_route(cycle.scope) if is_plain and app is self.app else None
        if route is not None:
            self._held = cycle, route
        else:
            self._start_task(cycle, app)

    def _start_task(self, cycle: Any, app: Any) -> None:
        super()._start_asgi_task(cycle, app)

    def _answer(self, cycle: Any, route: HotRoute) -> None:
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        try:
            answer = self.app.answer_now(route, cycle.scope, body, cycle.receive)
        except Exception:  # a bug of ours; the connection, and others' requests on it, go on
            log.exception("a request failed")
            answer = refusal(KvRouterError("internal error"))
        if isinstance(answer, Answer):
            self._write(cycle, answer)
        else:
            self._start_task(cycle, answered_by(answer))

    def _write(self, cycle: Any, answer: Answer) -> None:
        """What `send_answer` sends, in one piece."""
        pieces = [STATUS_LINES.get(answer.status) or b"HTTP/1.1 %d \r\n" % answer.status]
        for name, value in (*cycle.default_headers, *answer.headers):
            pieces += (name, b": ", value, b"\r\n")
        pieces.append(_TYPE_AND_LENGTH % len(answer.body))
        pieces.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        pieces.append(answer.body)
        self.transport.write(b"".join(pieces))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
