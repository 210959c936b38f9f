"""One request from the bus, with its headers, and its response.

The case of header names does not matter:

| `Content-Type` | JSON, unless msgpack is given; the response has the same type |
| `authorization` | a bearer token, as over HTTP |
| `x-timeout-s` | how long the caller waits |
| `x-waiting-inbox` | where it is announced that the caller has to wait |
| `x-request-id`, `traceparent` | as over HTTP; so are those of `READ_HEADERS` |

An error has the same body as over HTTP, with its text and status in the headers of NATS services.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec import Struct

from router.api.errors import DeadlineExceededError
from router.api.request_headers import READ_HEADERS
from router.api.rpc.codecs import JSON, Codec, codec_of
from router.api.rpc.responder import LINE_END, BusResponse, head_of, headers_of
from router.errors import InvalidFieldError, KvRouterError
from router.runtime.process.json_bodies import with_warnings
from router.runtime.process.request_ids import REQUEST_ID, TRACEPARENT, RequestIds
from router.runtime.security.caller import ANYBODY

UNKNOWN = "unknown"
TIMEOUT, WAITING_INBOX = "x-timeout-s", "x-waiting-inbox"
MAX_TIMEOUT_S = 86_400.0

MOST_HEADS, MOST_HEAD_BYTES = 256, 1024
"""Limits of cached heads: their number, and the length of each in bytes."""

_OF_ONE_REQUEST = {name.encode(): name for name in (REQUEST_ID, TRACEPARENT, WAITING_INBOX)}
_NONE: dict[str, str] = {}

T = TypeVar("T")


class RpcHead(Struct, frozen=True, eq=False):
    """The headers of a request but its own ids and inbox, shared by all requests with this head.

    `headers`: by their names as they were sent. `fields`: those with fields of the request.
    `problem`: why the head is refused, or None.
    """

    headers: dict[str, str]
    fields: dict[str, str]
    codec: Codec = JSON
    timeout_s: float | None = None
    problem: KvRouterError | None = None


class RpcRequest:
    """A request, and its response.

    `own`: the headers of this request alone. `fields`: headers with fields of the request.
    `method`: its command, once that is read; `shape`: the function from the command's reply to what
    is sent, or None. `unknown`: unknown fields.
    """

    __slots__ = (
        "_until_s",
        "caller",
        "fields",
        "head",
        "ids",
        "method",
        "own",
        "shape",
        "unknown",
    )

    def __init__(self, head: RpcHead, own: dict[str, str]) -> None:
        self.head = head
        self.own = own
        self.fields = head.fields
        self.ids = RequestIds()
        if own:
            given = own.get(REQUEST_ID)
            self.ids = RequestIds(given, own.get(TRACEPARENT))
            if given is not None:
                self.fields = {**head.fields, REQUEST_ID: given}
        self.method = UNKNOWN
        self.shape: Callable[[Any], Any] | None = None
        self.unknown: list[str] = []
        self.caller = ANYBODY
        self._until_s: float | None = None

    @property
    def waiting_inbox(self) -> bytes:
        """The inbox where it is announced that the caller has to wait, or b""."""
        return self.own.get(WAITING_INBOX, "").encode()

    async def in_time(self, work: Awaitable[T]) -> T:
        """Return a result. Cancels the work at the caller's timeout: DeadlineExceededError.

        The time is that of all work on this request.
        """
        timeout_s = self.head.timeout_s
        if timeout_s is None:
            return await work
        if self._until_s is None:
            self._until_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(self._until_s):
                return await work
        except TimeoutError as error:
            raise DeadlineExceededError(timeout_s) from error

    def answered(self, reply: Any) -> BusResponse:
        """Return the encoded reply."""
        codec, ids = self.head.codec, self.ids
        if self.shape is not None:
            reply = self.shape(reply)
        if self.unknown:
            reply = with_warnings(reply, self.unknown)
        if ids.given is None and ids.traceparent is None:
            return BusResponse(codec.encode(reply), codec.head)
        return BusResponse(codec.encode(reply), head_of(ids.answered(), codec.head))

    def refused(self, error: KvRouterError) -> BusResponse:
        """Return the encoded error."""
        codec = self.head.codec
        headers = {
            "Nats-Service-Error": " ".join(str(error).split()),
            "Nats-Service-Error-Code": str(error.http_status),
            **self.ids.answered(),
        }
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        body = codec.encode({"method": "error", **error.body()})
        return BusResponse(body, head_of(headers, codec.head))


class RpcHeads:
    """Heads of requests, found by their bytes, because callers repeat them."""

    __slots__ = ("_cache",)

    def __init__(self) -> None:
        self._cache: dict[bytes, RpcHead] = {}

    def request(self, sent: bytes) -> RpcRequest:
        """Return the request that was sent with these headers."""
        head = self._cache.get(sent)
        if head is not None:
            return RpcRequest(head, _NONE)
        own, shared = {}, []
        for line in sent.split(LINE_END):
            name, _, value = line.partition(b":")
            of_one = _OF_ONE_REQUEST.get(name.strip().lower())
            if of_one is None:
                shared.append(line)
            else:
                own[of_one] = value.strip().decode("utf-8", "replace")
        return RpcRequest(self._shared(LINE_END.join(shared)), own)

    def _shared(self, sent: bytes) -> RpcHead:
        """Return a head. Beyond the limit, all that are cached are dropped."""
        head = self._cache.get(sent)
        if head is None:
            head = _read_head(sent)
            if head.problem is None and len(sent) <= MOST_HEAD_BYTES:
                if len(self._cache) >= MOST_HEADS:
                    self._cache.clear()
                self._cache[sent] = head
        return head


def _read_head(sent: bytes) -> RpcHead:
    headers = headers_of(sent)
    named = {name.lower(): value for name, value in headers.items()}
    codec, timeout_s, problem = JSON, None, None
    try:
        codec = codec_of(named.get("content-type"))
        timeout_s = _timeout_s(named.get(TIMEOUT))
    except KvRouterError as error:
        problem = error
    fields = {name: named[name] for name in READ_HEADERS if name in named}
    return RpcHead(headers, fields, codec, timeout_s, problem)


def _timeout_s(text: str | None) -> float | None:
    """Return the caller's timeout, or None without one. Raises InvalidFieldError."""
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidFieldError(TIMEOUT, repr(text), f"seconds, above 0, at most {MAX_TIMEOUT_S:g}")
    return timeout_s
