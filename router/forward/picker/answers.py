"""The messages that a picker sends to a gateway, as bytes. Pure."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from router.forward.picker.steering import DESTINATION, LB
from router.forward.picker.wire.kv_router_picker_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpStatus,
    ImmediateResponse,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

CHUNK_BYTES = 62_000
"""The size of a body's chunks: gateways other than Envoy fail above 30 to 128 KB; all others send
the same."""

BOOKING = "x-kv-router-booking"
"""The field of the dynamic metadata with the booking's id, by which access logs name its end."""

_OVERWRITE = 2
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


def routed_headers(route: Route) -> bytes:
    """Return the answer to the headers of a request, whose body follows on its own."""
    common = CommonResponse(header_mutation=_mutation(route), clear_route_cache=True)
    answer = ProcessingResponse(request_headers=HeadersResponse(response=common))
    return _with_metadata(answer, route)


def routed_body(route: Route) -> bytes:
    """Return the answer to a buffered body, which routes the request."""
    common = CommonResponse(header_mutation=_mutation(route), clear_route_cache=True)
    if route.body is not None:
        common.body_mutation.body = route.body
    return _with_metadata(ProcessingResponse(request_body=BodyResponse(response=common)), route)


def _with_metadata(answer: ProcessingResponse, route: Route) -> bytes:
    fields = answer.dynamic_metadata.fields[LB].struct_value.fields
    fields[DESTINATION].string_value = route.addresses
    if route.booking:
        fields[BOOKING].string_value = route.booking
    return answer.SerializeToString()


def _mutation(route: Route) -> HeaderMutation:
    given = [(DESTINATION, route.addresses.encode()), *route.headers]
    names = {name for name, _ in given}
    removed = [name for name in route.removed if name not in names]
    return HeaderMutation(set_headers=_options(given), remove_headers=removed)


def _options(headers: Iterable[tuple[str, bytes]]) -> list[HeaderValueOption]:
    return [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value), append_action=_OVERWRITE)
        for name, value in headers
    ]


def body_chunks(body: bytes, *, of_response: bool = False, is_last: bool = True) -> list[bytes]:
    """Return a body as chunks of at most `CHUNK_BYTES`; an empty one is an empty chunk.

    `is_last`: the last chunk ends the stream; otherwise trailers or further chunks follow.
    """
    view, starts = memoryview(body), range(0, max(1, len(body)), CHUNK_BYTES)
    answers = []
    for start in starts:
        chunk = bytes(view[start : start + CHUNK_BYTES])
        streamed = StreamedBodyResponse(body=chunk, end_of_stream=is_last and start == starts[-1])
        common = CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))
        answer = BodyResponse(response=common)
        message = (
            ProcessingResponse(response_body=answer)
            if of_response
            else ProcessingResponse(request_body=answer)
        )
        answers.append(message.SerializeToString())
    return answers


def refused(refusal: Refusal) -> bytes:
    """Return an answer that ends a request without an engine."""
    status = refusal.status
    if status not in _STATUSES:
        status = 429 if status == 529 else 500 if status >= 500 else 400
    kind = ("content-type", b"application/json")
    headers = _options([kind, *((name.decode(), value) for name, value in refusal.headers)])
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=status),
            headers=HeaderMutation(set_headers=headers),
            body=refusal.body,
            details=f"kv_router_{refusal.code}",
        )
    ).SerializeToString()


REQUEST_HEADERS = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
REQUEST_TRAILERS = ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString()
RESPONSE_HEADERS = ProcessingResponse(response_headers=HeadersResponse()).SerializeToString()
RESPONSE_BODY = ProcessingResponse(response_body=BodyResponse()).SerializeToString()
RESPONSE_TRAILERS = ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString()
"""Answers that change nothing."""
