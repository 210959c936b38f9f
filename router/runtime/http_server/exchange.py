"""A hot request and its response.

head ─▶ admitted ─▶ body, within limits ─▶ handler ─▶ response ─▶ the next request
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, Protocol, TypeAlias

import msgspec
from msgspec import Struct
from uvicorn.protocols.http.flow_control import FlowControl

from router.errors import KvRouterError
from router.runtime.http_server.head_cache import HeadCache
from router.runtime.process.request_ids import REQUEST_ID, TRACEPARENT, RequestIds
from router.runtime.security.caller import ANYBODY, Caller
from router.runtime.security.guard import Access
from router.runtime.security.guarded import refusal_headers

JSON, BINARY = "application/json", "application/octet-stream"
JSON_PAIR = (b"content-type", b"application/json")

MOST_HEADS = 1024

_JSON_BYTES = JSON.encode()
_REQUEST_ID, TRACE_NAME = REQUEST_ID.encode(), TRACEPARENT.encode()
_LENGTH = b"content-length"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_CLOSE = b"connection: close\r\n"
_WHOLE = b"%b%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_NO_CONTENT = 204
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}

Pairs: TypeAlias = Sequence[tuple[bytes, bytes]]


class ErrorFormat(Protocol):
    """The format of a route's errors."""

    @property
    def reply(self) -> Callable[[KvRouterError], tuple[int, object]]:
        """The function that returns the status and the body of an error response."""
        ...

    @property
    def event(self) -> Callable[[KvRouterError], bytes]:
        """The function that returns an error as the last event of a stream."""
        ...


class HotRoute(Struct, frozen=True):
    """A route served below ASGI.

    `path`: as counted in metrics. `handler`: called with the exchange once its body is complete.
    `media_types`: of accepted bodies; empty: any. `ends_with_client`: a client that disconnects
    cancels its request. `is_new_work`: refused while the process is overloaded. `errors`: their
    format; None: the service's.
    """

    path: str
    handler: Callable[["Exchange"], Any]
    media_types: tuple[str, ...] = ()
    ends_with_client: bool = False
    is_new_work: bool = False
    errors: ErrorFormat | None = None

    def id_in(self, path: str) -> str:
        """Return the id in a path of this route; empty if the route has none."""
        before, parameter, after = self.path.partition("{request_id}")
        return path[len(before) : len(path) - len(after)] if parameter else ""


class RequestHead:
    """A request head without its ids, trace and length, shared by all requests with this head.

    `headers`: the first value of each name. `access`: of its caller, once a request with it was let
    in. `is_checked`: the type of its body is accepted.
    `is_repeated`: it came before. `derived`: anything that handlers derive from it.
    """

    __slots__ = (
        "access",
        "derived",
        "headers",
        "is_checked",
        "is_repeated",
        "media_type",
        "method",
        "pairs",
        "query",
        "route",
    )

    def __init__(self, route: HotRoute, method: str, query: bytes, pairs: Pairs = ()) -> None:
        self.route = route
        self.method = method
        self.query = query
        self.pairs = pairs
        self.headers = dict(reversed(pairs))
        kind = self.headers.get(b"content-type", b"")
        is_json = kind == _JSON_BYTES
        self.media_type = JSON if is_json else _without_parameters(kind)
        self.is_checked = self.is_repeated = False
        self.derived: Any = None
        self.access: Access | None = None

    def header(self, name: bytes) -> str | None:
        """Return the first value of a header, or None; `name` in lower case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


def _without_parameters(kind: bytes) -> str:
    return kind.decode("latin-1").partition(";")[0].strip().lower()


class HeadValues(Struct):
    """The headers of a single request: its ids, its traces, and the length of its body."""

    request_ids: list[bytes]
    traces: list[tuple[bytes, bytes]]
    length_bytes: int = 0

    def ids(self) -> RequestIds:
        """Return the ids of the request: the first one, and no trace if there are several."""
        return RequestIds(
            self.request_ids[0].decode("latin-1") if self.request_ids else None,
            self.traces[0][1].decode("latin-1") if len(self.traces) == 1 else None,
        )


def split(headers: Pairs) -> tuple[tuple[tuple[bytes, bytes], ...], HeadValues]:
    """Return the headers that requests share, and the values of a single one."""
    shared, values = [], HeadValues([], [])
    for pair in headers:
        name, value = pair
        if name == _REQUEST_ID:
            values.request_ids.append(value)
        elif name == TRACE_NAME:
            values.traces.append(pair)
        elif name == _LENGTH:
            values.length_bytes = int(value)
        else:
            shared.append(pair)
    return tuple(shared), values


class RequestHeads:
    """Heads of hot requests, found by their bytes or by their parsed headers.

    A head is found by its bytes from its third request on. Beyond the limit all are dropped.
    `before_id`: the beginning of the paths with an id; empty without such.
    """

    __slots__ = ("_cache", "_parsed", "find")

    def __init__(self, before_id: str = "") -> None:
        self._cache: HeadCache[RequestHead] = HeadCache(MOST_HEADS, before_id.encode())
        self._parsed: dict[tuple[Any, ...], RequestHead] = {}
        self.find = self._cache.find

    def parsed(self, route: HotRoute, method: str, query: bytes, pairs: Pairs) -> RequestHead:
        """Return the head with these values and shared headers."""
        key = (method, route.path, query, pairs)
        head = self._parsed.get(key)
        if head is not None:
            head.is_repeated = True
            return head
        if len(self._parsed) >= MOST_HEADS:
            self._parsed.clear()
        head = self._parsed[key] = RequestHead(route, method, query, pairs)
        return head

    def remember(self, data: bytes, head: RequestHead, path_id: str, values: HeadValues) -> None:
        """Cache a repeated head that begins these bytes, which end with its body or before."""
        ids, traces = values.request_ids, [trace for _, trace in values.traces]
        is_plain = len(ids) < 2 and len(traces) < 2 and all(ids) and all(traces)
        if head.is_repeated and is_plain:
            found = (path_id.encode(), b"".join(ids), b"".join(traces))
            self._cache.remember(data, head, found)


class FirstLines(dict[int, bytes]):
    """The first lines of responses by status, made at first use: status, and common headers."""

    __slots__ = ("headers",)

    def __init__(self, headers: Pairs = ()) -> None:
        super().__init__()
        self.headers = headers

    def renew(self, headers: Pairs) -> None:
        """Replace the headers of all responses, such as the date."""
        self.headers = headers
        self.clear()

    def __missing__(self, status: int) -> bytes:
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        lines = self[status] = line + encoded_headers(self.headers)
        return lines


def encoded_headers(headers: Pairs) -> bytes:
    """Return the lines of headers. Raises ValueError for a line break in one of them."""
    lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise ValueError("a line break in a header")
    return lines


class Wire(Protocol):
    """The connection of an exchange."""

    transport: asyncio.Transport
    flow: FlowControl
    lines: FirstLines

    def error_reply(self, error: KvRouterError) -> tuple[int, object]:
        """Return the status and the body of an error response."""
        ...


class _NoWakeup:
    """A no-op event: uvicorn sets it when data arrives, and no task waits for it."""

    def set(self) -> None:
        """Do nothing."""


class Exchange(Struct, eq=False):
    """A request and its response.

    `path_id`: the id in the path; empty without one. `length_bytes`: the announced length of the
    body. `received`: the body so far. `unknown`: the unknown fields of the body, named by the
    handler. `own_lines`: of headers added to the response. `traces`: the client's trace headers.
    `is_counted`: it counts as in flight, and `held_bytes` of
    its body against the limit of all bodies. `has_chunks`: the client supports chunked bodies; for
    other clients a stream ends with the connection. `later`: the rest of the handler's work.
    `task`: the task that runs it.

    Attributes that uvicorn's connection reads have uvicorn's names. Setting one takes as long as a
    call, so an answer at once sets few.
    """

    wire: Wire
    head: RequestHead
    path_id: str
    ids: RequestIds
    length_bytes: int = 0
    received: bytes | bytearray = b""
    more_body: bool = True
    caller: Caller = ANYBODY
    keep_alive: bool = True
    has_chunks: bool = True
    expects_continue: bool = False
    disconnected: bool = False
    is_streaming: bool = False
    response_complete: bool = False
    is_counted: bool = False
    held_bytes: int = 0
    own_lines: bytes = b""
    traces: Pairs = ()
    unknown: list[str] = []
    later: Coroutine[Any, Any, None] | None = None
    task: asyncio.Task[None] | None = None
    _stream_head: bytes | None = None
    _gone: asyncio.Future[None] | None = None
    message_event: ClassVar[_NoWakeup] = _NoWakeup()

    # ── The request ──────────────────────────────────────────────────────────────────────────────

    def receive(self, piece: bytes) -> None:
        """Add a further piece of the body."""
        if isinstance(self.received, bytes):
            self.received = bytearray(self.received)
        self.received += piece  # one buffer: many small pieces would take many times their size

    def body(self) -> bytes:
        """Return the received body once, and drop it."""
        body, self.received = self.received, b""
        return bytes(body)

    async def gone(self) -> None:
        """Wait until the client has disconnected."""
        if not self.disconnected:
            self._gone = asyncio.get_running_loop().create_future()
            await self._gone

    def disconnect(self) -> None:
        """Record that the client has disconnected."""
        self.disconnected = True
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    # ── The response ─────────────────────────────────────────────────────────────────────────────

    @property
    def response_started(self) -> bool:
        """True once a part of the response was sent, or the head of a stream prepared."""
        return self.is_streaming or self.response_complete

    @property
    def is_slow(self) -> bool:
        """True if the client reads more slowly than the response arrives."""
        return self.wire.flow.write_paused and not self.disconnected

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        await self.wire.flow.drain()

    def start(self, status: int, lines: bytes) -> None:
        """Prepare the head of a streamed response; it is sent with the first piece."""
        self._stream_head = self._head(status, lines + _CHUNKED if self.has_chunks else lines)
        self.is_streaming = True

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if data and not self.has_chunks:
            self._send(self._taken_head() + data)
        elif data:
            self._send(b"%b%x\r\n%b\r\n" % (self._taken_head(), len(data), data))

    def finish(self) -> None:
        """End a streamed response."""
        self._send(self._taken_head() + (b"0\r\n\r\n" if self.has_chunks else b""))
        self._complete()

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a whole response with the lines of its headers."""
        if status != _NO_CONTENT:
            lines = b"%bcontent-length: %d\r\n" % (lines, len(body))
        self._send(self._head(status, lines) + body)
        self._complete()

    def json(self, body: bytes, status: int = 200, headers: Pairs = ()) -> None:
        """Send a whole response with a JSON body."""
        wire, more = self.wire, b""
        if headers or self.own_lines or not self.keep_alive:
            more = self._more_lines(headers)
        if not self.disconnected:
            wire.transport.write(_WHOLE % (wire.lines[status], more, len(body), body))
        self.response_complete = True
        if not self.keep_alive:
            wire.transport.close()

    def refuse(self, error: KvRouterError) -> None:
        """Send an error, as a response or as the last event of a stream."""
        if self.response_complete:
            return
        errors = self.head.route.errors
        status, reply = (self.wire.error_reply if errors is None else errors.reply)(error)
        body = msgspec.json.encode(reply)
        if self.response_started:
            self.write(b"data: " + body + b"\n\n" if errors is None else errors.event(error))
            self.finish()
        else:
            self.json(body, status, refusal_headers(error))

    def _head(self, status: int, lines: bytes) -> bytes:
        end = b"\r\n" if self.keep_alive else _CLOSE + b"\r\n"
        return b"%b%b%b%b" % (self.wire.lines[status], lines, self.own_lines, end)

    def _more_lines(self, headers: Pairs) -> bytes:
        end = b"" if self.keep_alive else _CLOSE
        return b"%b%b%b" % (encoded_headers(headers), self.own_lines, end)

    def _taken_head(self) -> bytes:
        head, self._stream_head = self._stream_head or b"", None
        return head

    def _send(self, data: bytes) -> None:
        if data and not self.disconnected:
            self.wire.transport.write(data)

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self.wire.transport.close()
