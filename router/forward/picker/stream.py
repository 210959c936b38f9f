"""The state of one ext_proc stream: one request at a gateway. Messages in, answers out; no I/O.

    headers ─▶ `head` ─▶ body… ─▶ end of body, or trailers ─▶ `is_complete` ─▶ route() or refuse()
                                                                                    │
                    response headers ─▶ `response` ─▶ [bodies, echoed] ─▶ [trailers] ◀┘

The headers are answered when the whole body is there. A caller is admitted by the `head`, before
any of the body is received. Sources: Envoy 1.40
`source/extensions/filters/http/ext_proc`; GIE proposal 004.
"""

from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct as ProtoStruct
from google.protobuf.struct_pb2 import Value
from msgspec import Struct

from router.forward.errors import GatewayModeError
from router.forward.headers import Pairs
from router.forward.picker import answers
from router.forward.picker.answers import Refusal, Route
from router.forward.picker.steering import EXT_PROC, LB, SUBSET_HINT, served_address, subset_of
from router.forward.picker.wire.kv_router_picker_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
)
from router.runtime.http_server.limits import HeadersTooLargeError, HttpLimits
from router.runtime.process.errors import BodyTooLargeError, MalformedBodyError

NONE, STREAMED, BUFFERED, _PARTIAL, FULL_DUPLEX, _GRPC = range(6)
"""Envoy's modes of bodies."""

_PSEUDO = (b":method", b":path")
_NAMES = {b":authority": b"host"}
"""Pseudo headers that HTTP/1.1 has as headers."""
_LENGTH_DIGITS = 18


class StreamLimits(Struct, frozen=True):
    """Limits of one request. `head`: of its headers."""

    body_limit_bytes: int
    head: HttpLimits


class GatewayHead(Struct, frozen=True):
    """The headers of a request, without pseudo headers. `path`: with its query.

    `subset`: see `subset_of`. `length_bytes`: of the body, as announced; 0 if it is not.
    """

    method: str
    path: str
    headers: Pairs
    subset: frozenset[str] | None = None
    length_bytes: int = 0


class GatewayResponse(Struct, frozen=True):
    """The begin of an engine's answer. `served`: the address of the engine, if it is known."""

    status: int
    served: str | None


class PickerStream:
    """The state of a stream.

    `head`: set by the first message. `is_complete`: the whole request is there.
    `is_settled`: it is routed or refused. `response`: set once an engine's answer has begun.
    `held_bytes`: of the body, until it is sent back.
    """

    __slots__ = (
        "_body",
        "_has_trailers",
        "_is_bodiless",
        "_limits",
        "_request_mode",
        "_response_mode",
        "head",
        "held_bytes",
        "is_complete",
        "is_settled",
        "response",
    )

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._body: list[bytes] = []
        self._request_mode = self._response_mode = FULL_DUPLEX
        self.is_settled = self._is_bodiless = self._has_trailers = False
        self.head: GatewayHead | None = None
        self.held_bytes = 0
        self.is_complete = False
        self.response: GatewayResponse | None = None

    @property
    def is_waiting(self) -> bool:
        """True while the request is not complete."""
        return not self.is_complete and not self.is_settled

    @property
    def body(self) -> bytes:
        """The body so far, until the request is routed or refused. O(bytes)."""
        return b"".join(self._body)

    def receive(self, data: bytes) -> list[bytes]:
        """Return the answers to a message, none if they have to wait.

        Raises MalformedBodyError for a message that cannot be read, and the errors that refuse a
        request: HeadersTooLargeError, BodyTooLargeError, GatewayModeError.
        """
        try:
            message = ProcessingRequest.FromString(data)
        except DecodeError as error:
            raise MalformedBodyError(f"ext_proc message: {error}") from error
        kind = message.WhichOneof("request")
        if kind is None or message.observability_mode:
            return []
        if kind.startswith("response"):
            return self._of_response(kind, message)
        return [] if self.is_settled else self._of_request(kind, message)

    # ── The request ──────────────────────────────────────────────────────────────────────────────

    def _of_request(self, kind: str, message: ProcessingRequest) -> list[bytes]:
        if kind == "request_headers":
            return self._take_head(message)
        if self.head is None:
            raise MalformedBodyError("ext_proc: no headers came before", "headers first")
        if kind == "request_body":
            return self._take_body(message.request_body)
        if self.is_complete:  # a buffered body is complete before its trailers
            return [answers.REQUEST_TRAILERS]
        self._has_trailers = self.is_complete = True
        return []

    def _take_head(self, message: ProcessingRequest) -> list[bytes]:
        if self.head is not None:
            return []
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        headers = message.request_headers
        pairs = _pairs(headers, self._limits.head)
        first = dict(reversed(pairs))
        method, path = [first.get(name, b"").decode("latin-1") for name in _PSEUDO]
        own = [
            pair if pair[0] not in _NAMES else (_NAMES[pair[0]], pair[1])
            for pair in pairs
            if pair[0][:1] != b":" or pair[0] in _NAMES
        ]
        hints = message.metadata_context.filter_metadata
        subset = subset_of(_plain(hints[SUBSET_HINT])) if SUBSET_HINT in hints else None
        length = first.get(b"content-length", b"")
        length_bytes = int(length) if len(length) <= _LENGTH_DIGITS and length.isdigit() else 0
        self.head = GatewayHead(method, path, tuple(own), subset, length_bytes)
        if headers.end_of_stream or b"upgrade" in first:
            self._is_bodiless = self.is_complete = True
            return []
        if self._request_mode == BUFFERED:
            return [answers.REQUEST_HEADERS]  # the gateway waits for it before it sends the body
        if self._request_mode != FULL_DUPLEX:
            raise GatewayModeError(self._request_mode)
        return []

    def _take_body(self, message: HttpBody) -> list[bytes]:
        if self.is_complete:
            return []  # Envoy 1.35 to 1.37 repeats the end of long bodies
        self.held_bytes += len(message.body)
        if self.held_bytes > self._limits.body_limit_bytes:
            raise BodyTooLargeError(self._limits.body_limit_bytes)
        if message.body:
            self._body.append(message.body)
        if message.end_of_stream or self._request_mode == BUFFERED:
            self.is_complete = True
        return []

    def route(self, route: Route) -> list[bytes]:
        """Return the answers that send the request to an endpoint, and its body behind them."""
        assert self.is_complete
        assert not self.is_settled
        body = self.body if route.body is None else route.body
        self.is_settled, self._body, self.held_bytes = True, [], 0
        if self._is_bodiless:
            return [answers.routed_headers(route)]
        if self._request_mode == BUFFERED:
            return [answers.routed_body(route)]
        sent = [answers.routed_headers(route)]
        if body or not self._has_trailers:
            sent += answers.body_chunks(body, is_last=not self._has_trailers)
        if self._has_trailers:
            sent.append(answers.REQUEST_TRAILERS)
        return sent

    def refuse(self, refusal: Refusal) -> list[bytes]:
        """Return the answer that ends the request, at any time; no other one follows."""
        self.is_settled, self._body, self.held_bytes = True, [], 0
        return [answers.refused(refusal)]

    # ── The response ─────────────────────────────────────────────────────────────────────────────

    def _of_response(self, kind: str, message: ProcessingRequest) -> list[bytes]:
        if kind == "response_headers":
            self.response = _response(message)
            return [answers.RESPONSE_HEADERS]
        if kind == "response_trailers":
            return [answers.RESPONSE_TRAILERS]
        if self._response_mode != FULL_DUPLEX:
            return [answers.RESPONSE_BODY]
        body = message.response_body
        return answers.body_chunks(body.body, of_response=True, is_last=body.end_of_stream)


def _pairs(headers: HttpHeaders, limits: HttpLimits) -> Pairs:
    """Return the headers in lower case, duplicates in order. Raises HeadersTooLargeError."""
    found = headers.headers.headers
    if len(found) > limits.max_headers + len(_PSEUDO) + _MORE_PSEUDO:
        raise HeadersTooLargeError(limits)
    pairs, size_bytes = [], 0
    for each in found:
        name, value = each.key.lower().encode(), each.raw_value or each.value.encode()
        size_bytes += len(name) + len(value)
        pairs.append((name, value))
    if size_bytes > limits.header_limit_bytes:
        raise HeadersTooLargeError(limits)
    return pairs


_MORE_PSEUDO = 2
"""`:authority` and `:scheme`."""


def _response(message: ProcessingRequest) -> GatewayResponse:
    pairs = {each.key: each for each in message.response_headers.headers.headers}
    status = pairs.get(":status")
    written = b"" if status is None else status.raw_value or status.value.encode()
    metadata = message.metadata_context.filter_metadata
    served = served_address(
        {LB: _plain(metadata[LB])} if LB in metadata else {},
        {EXT_PROC: _plain(message.attributes[EXT_PROC])} if EXT_PROC in message.attributes else {},
    )
    return GatewayResponse(int(written) if written.isdigit() else 0, served)


def _plain(fields: ProtoStruct) -> dict[str, Any]:
    """Return the fields of protobuf's JSON as Python's values, of the kinds that are read."""
    return {name: _value(value) for name, value in fields.fields.items()}


def _value(value: Value) -> Any:
    """Return a text, a list, or None for anything else: a tenth of `MessageToDict`'s time."""
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        return value.string_value
    return [_value(each) for each in value.list_value.values] if kind == "list_value" else None
