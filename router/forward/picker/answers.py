"""The messages that a picker sends to a gateway, as bytes. Pure.

They are few and small: written by hand, they take half the time of generated code, and of long
bodies, which that copies again and again, a quarter. The numbers of fields are those of
`wire/kv_router_picker.proto`.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from msgspec import Struct

from router.forward.picker.steering import DESTINATION, LB

CHUNK_BYTES = 62_000
"""The size of a body's chunks: gateways other than Envoy fail above 30 to 128 KB; all others send
the same."""

BOOKING = "x-kv-router-booking"
"""The field of the dynamic metadata with the booking's id, by which access logs name its end."""

_OVERWRITE = b"\x18\2"
_STATUSES = frozenset((*range(400, 418), 421, 422, 423, 424, 426, 428, 429, 431, *range(500, 509)))
"""The error statuses that Envoy's enumeration contains and sends."""


class Route(Struct, frozen=True):
    """The way of a request. `addresses`: `ip:port`, and fallbacks behind it, with commas between.

    `headers`: further ones for the engine; `removed`: names of headers that it must not receive.
    `body`: in place of the client's; None: the client's. `booking`: the id of the booking.
    """

    addresses: str
    headers: Sequence[tuple[str, bytes]] = ()
    removed: Sequence[str] = ()
    body: bytes | None = None
    booking: str = ""


class Refusal(Struct, frozen=True):
    """An answer in place of an engine's. `code`: the name of the error, for access logs."""

    status: int
    body: bytes
    code: str
    headers: Sequence[tuple[bytes, bytes]] = ()


def _head(number: int, size_bytes: int) -> bytes:
    """Return what is before the content of a field: its number below 16, and its length."""
    if size_bytes < 0x80:
        return b"%c%c" % (number << 3 | _CONTENT, size_bytes)
    written = bytearray((number << 3 | _CONTENT,))
    while size_bytes >= 0x80:
        written.append(size_bytes & 0x7F | 0x80)
        size_bytes >>= 7
    written.append(size_bytes)
    return bytes(written)


_CONTENT = 2
"""The wire type of texts, bytes and messages."""


def _heads(size_bytes: int, *numbers: int) -> bytes:
    """Return the heads of fields in each other. `numbers`: from the innermost one outwards."""
    heads = b""
    for number in numbers:
        heads = _head(number, size_bytes + len(heads)) + heads
    return heads


def _field(content: bytes, *numbers: int) -> bytes:
    """Return a field in others; see `_heads`."""
    for number in numbers:
        content = _head(number, len(content)) + content
    return content


def routed_headers(route: Route) -> bytes:
    """Return the answer to the headers of a request, whose body follows on its own.

    It ends with the id of the booking: what is before it is the same for all requests of an engine.
    """
    booking, headers, removed = route.booking.encode(), tuple(route.headers), tuple(route.removed)
    return _before_booking(route.addresses, headers, removed, len(booking)) + booking


@lru_cache(maxsize=1024)
def _before_booking(
    addresses: str, headers: tuple[tuple[str, bytes], ...], removed: tuple[str, ...], id_bytes: int
) -> bytes:
    """Return an answer to headers up to the id of its booking, which has `id_bytes`."""
    route = Route(addresses, headers, removed, booking="0" * id_bytes)
    whole = _field(_mutation(route) + _CLEAR_ROUTE_CACHE, 1, 1) + _metadata(route)
    return whole[: len(whole) - id_bytes]


def routed_body(route: Route) -> bytes:
    """Return the answer to a buffered body, which routes the request."""
    body = b"" if route.body is None else _field(route.body, 1, 3)
    return _field(_mutation(route) + body + _CLEAR_ROUTE_CACHE, 1, 3) + _metadata(route)


_CLEAR_ROUTE_CACHE = b"\x28\1"


def _metadata(route: Route) -> bytes:
    fields = _field(_DESTINATION + _field(route.addresses.encode(), 3, 2), 1)
    if route.booking:
        fields += _field(_BOOKING + _field(route.booking.encode(), 3, 2), 1)
    return _field(_LB + _field(fields, 5, 2), 1, 8)


_DESTINATION, _BOOKING, _LB = (_field(name.encode(), 1) for name in (DESTINATION, BOOKING, LB))


def _mutation(route: Route) -> bytes:
    options = _option(_DESTINATION, route.addresses.encode()) + _options(route.headers)
    if route.removed:
        kept = {DESTINATION, *(name for name, _ in route.headers)}
        options += b"".join(_field(name.encode(), 2) for name in route.removed if name not in kept)
    return _field(options, 2)


def _options(headers: Iterable[tuple[str, bytes]]) -> bytes:
    return b"".join(_option(_field(name.encode(), 1), value) for name, value in headers)


def _option(name: bytes, value: bytes) -> bytes:
    return _field(_field(name + _field(value, 3), 1) + _OVERWRITE, 1)


def body_chunks(body: bytes, *, of_response: bool = False, is_last: bool = True) -> list[bytes]:
    """Return a body as chunks of at most `CHUNK_BYTES`; an empty one is an empty chunk.

    `is_last`: the last chunk ends the stream; otherwise trailers or further chunks follow.
    """
    view, number = memoryview(body), 4 if of_response else 3
    answers, last = [], max(0, len(body) - 1) // CHUNK_BYTES * CHUNK_BYTES
    for start in range(0, last + 1, CHUNK_BYTES):
        chunk, end = view[start : start + CHUNK_BYTES], _END * (is_last and start == last)
        answers.append(b"".join((_before_chunk(len(chunk), len(end), number), chunk, end)))
    return answers


_END = b"\x10\1"


@lru_cache(maxsize=1024)
def _before_chunk(size_bytes: int, end_bytes: int, number: int) -> bytes:
    """Return what is before a chunk in an answer. `number`: of the answer's outermost field."""
    head = _head(1, size_bytes)
    return _heads(len(head) + size_bytes + end_bytes, 3, 3, 1, number) + head


def refused(refusal: Refusal) -> bytes:
    """Return an answer that ends a request without an engine."""
    status = refusal.status
    if status not in _STATUSES:
        status = 429 if status == 529 else 500 if status >= 500 else 400
    kind = ("content-type", b"application/json")
    headers = _options([kind, *((name.decode(), value) for name, value in refusal.headers)])
    code = bytes((0x08, status & 0x7F | 0x80, status >> 7))
    parts = (
        _field(code, 1),
        _field(headers, 2),
        _field(refusal.body, 3),
        _field(f"kv_router_{refusal.code}".encode(), 5),
    )
    return _field(b"".join(parts), 7)


REQUEST_HEADERS, RESPONSE_HEADERS, _, RESPONSE_BODY, REQUEST_TRAILERS, RESPONSE_TRAILERS = (
    _head(number, 0) for number in range(1, 7)
)
"""Answers that change nothing."""
