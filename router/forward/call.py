"""A request for a completion on its connection, and the client's side of its answer.

head ─▶ admitted ─▶ body, within limits ─▶ a task answers it ─▶ written ─▶ the next request
"""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Protocol

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl

from router.errors import KvRouterError
from router.forward.bodies import OpenAiPath
from router.forward.errors import reason_of
from router.forward.headers import Pairs
from router.forward.words import Words
from router.process.request_ids import REQUEST_ID, TRACEPARENT, RequestIds
from router.security.caller import Caller
from router.security.guarded import refusal_headers

_REQUEST_ID, _TRACEPARENT = REQUEST_ID.encode(), TRACEPARENT.encode()
_JSON = (b"content-type", b"application/json")
_CHUNKED = (b"transfer-encoding", b"chunked")
_NO_CONTENT = 204
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class Wire(Protocol):
    """The connection that a call came on."""

    transport: asyncio.Transport
    flow: FlowControl

    @property
    def said_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """What every answer says."""
        ...

    def on_response_complete(self) -> None:
        """The answer is written, all of it."""
        ...


class _Nobody:
    """Whom uvicorn wakes; nobody waits here."""

    def set(self) -> None:
        """Wake nobody."""


_NOBODY = _Nobody()


class Call:
    """A request, and its answer. `has_started`: its head is out, and cannot be changed.
    `own_headers`: what it says beside the engine's. `held_bytes`: what of its body counts until it
    is answered. `has_chunks`: the client knows bodies in
    pieces; for others a stream ends with the connection.

    What uvicorn's connection wants to know of the request that it answers has uvicorn's names.
    """

    __slots__ = (
        "_body",
        "_head",
        "_wire",
        "caller",
        "disconnected",
        "has_chunks",
        "headers",
        "held_bytes",
        "ids",
        "is_turn",
        "keep_alive",
        "known_words",
        "more_body",
        "own_headers",
        "path",
        "response_complete",
        "response_started",
        "task",
    )
    message_event = _NOBODY

    def __init__(
        self,
        wire: Wire,
        path: OpenAiPath,
        headers: Pairs,
        *,
        keep_alive: bool,
        has_chunks: bool = True,
        ids: RequestIds | None = None,
        known_words: list[Words] | None = None,
    ) -> None:
        """`known_words`: those that came under this head, if it is one that comes again; `ids`:
        what it says of them, if that is known already.
        """
        self._wire = wire
        self.path = path
        self.headers = headers
        self.keep_alive = keep_alive
        self.has_chunks = has_chunks
        self.caller: Caller | None = None
        self.task: asyncio.Task[None] | None = None
        self.ids = _ids_of(headers) if ids is None else ids
        self.known_words = known_words
        self.own_headers: Pairs = ()
        self._body: bytes | bytearray = b""
        self._head: bytes | None = None
        self.more_body = True
        self.held_bytes = 0
        self.is_turn = self.disconnected = False
        self.response_started = self.response_complete = False

    # ── The request ──────────────────────────────────────────────────────────────────────────────

    def receive(self, piece: bytes) -> None:
        """A piece of its body."""
        if not self._body:
            self._body = piece  # most come whole
            return
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += piece  # in one piece: small ones would take many times their size

    @property
    def received_bytes(self) -> int:
        """How long the body is so far."""
        return len(self._body)

    def body(self) -> bytes:
        """All that came of the body, once; then it is forgotten."""
        body, self._body = self._body, b""
        return bytes(body)

    # ── The answer ───────────────────────────────────────────────────────────────────────────────

    @property
    def has_started(self) -> bool:
        """Whether something of the answer is out."""
        return self.response_started

    @property
    def is_slow(self) -> bool:
        """Whether the client has to be waited for."""
        return self._wire.flow.write_paused and not self.disconnected

    async def drained(self) -> None:
        """Wait until it has read."""
        await self._wire.flow.drain()

    def start(self, status: int, headers: Pairs) -> None:
        """The head of an answer in pieces; it goes out with the first."""
        self._head = self._encoded(status, [*headers, _CHUNKED] if self.has_chunks else headers)
        self.response_started = True

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if data and not self.has_chunks:
            self._send(self._taken_head() + data)
        elif data:
            self._send(b"%b%x\r\n%b\r\n" % (self._taken_head(), len(data), data))

    def finish(self) -> None:
        """The answer is whole."""
        self._send(self._taken_head() + (b"0\r\n\r\n" if self.has_chunks else b""))
        self._complete()

    def whole(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send an answer at once."""
        length = [] if status == _NO_CONTENT else [(b"content-length", b"%d" % len(body))]
        head = self._encoded(status, [*headers, *length])
        self.response_started = True
        self._send(head + body)
        self._complete()

    def json(self, value: object, status: int = 200, headers: Pairs = ()) -> None:
        """The same, of a value."""
        self.whole(status, [_JSON, *headers], msgspec.json.encode(value))

    def refuse(self, error: KvRouterError) -> None:
        """Say why there is no answer, or no more of it."""
        if self.response_complete:
            return
        if self.response_started:
            self.write(b"data: " + msgspec.json.encode(refusal(error)) + b"\n\n")
            self.finish()
        else:
            self.json(refusal(error), refusal_status(error), refusal_headers(error))

    def _encoded(self, status: int, headers: Pairs) -> bytes:
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        own = (_REQUEST_ID, self.ids.request_id.encode())
        pairs = (*self._wire.said_headers, *headers, *self.own_headers, own)
        lines += [b"%b: %b\r\n" % pair for pair in pairs]
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a line break in a header")
        return head + (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")

    def _taken_head(self) -> bytes:
        head, self._head = self._head or b"", None
        return head

    def _send(self, data: bytes) -> None:
        if data and not self.disconnected:
            self._wire.transport.write(data)

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._wire.transport.close()
        self._wire.on_response_complete()


def _ids_of(headers: Pairs) -> RequestIds:
    request_id: str | None = None
    traceparent: str | None = None
    for name, value in headers:
        if name == _REQUEST_ID:
            request_id = value.decode("latin-1")
        elif name == _TRACEPARENT:
            traceparent = value.decode("latin-1")
    return RequestIds(request_id, traceparent)


def refusal_status(error: KvRouterError) -> int:
    """OpenAI's clients know one for whatever is wrong with a request: 400, BadRequestError."""
    return 400 if error.http_status == 422 else error.http_status


def refusal(error: KvRouterError) -> dict[str, object]:
    """An error in the shape of OpenAI's."""
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    param = error.body().get("field")
    return {
        "error": {"message": reason_of(error), "type": kind, "param": param, "code": error.code}
    }
