"""What headers add to a request, and the id that it goes by."""

from collections.abc import Mapping
from uuid import uuid4

from msgspec import structs

from router.errors import InvalidFieldError
from router.protocol.requests import SelectRequest

MAX_ID_CHARACTERS = 256
REQUEST_ID_HEADER = "x-request-id"
SELECT_HEADERS = {
    "request_id": REQUEST_ID_HEADER,
    "policy_class": "x-dynamo-meta-policy-class",
    "tenant": "x-llm-d-inference-fairness-id",
    "session_id": "x-dynamo-session-id",
}
"""Fields of a request that gateways put into headers, as Dynamo and llm-d name them."""


def asked_with(request: SelectRequest, headers: Mapping[str, str]) -> SelectRequest:
    """A request, and what its headers say that it does not. Raises InvalidFieldError for an unfit
    header.
    """
    said = {
        field: _fit(header, headers[header])
        for field, header in SELECT_HEADERS.items()
        if header in headers and getattr(request, field) is None
    }
    request_id = said.pop("request_id", None)
    return identified(structs.replace(request, **said) if said else request, request_id)


def identified(request: SelectRequest, header_id: str | None) -> SelectRequest:
    """A request under its id: that of the selection, or else its own, or else its header's."""
    request_id = request.selection_id or request.request_id or header_id
    if request_id == request.request_id:
        return request
    return structs.replace(request, request_id=request_id)


def bookable(request: SelectRequest) -> SelectRequest:
    """The request, under an id of ours if it has none."""
    if request.request_id is not None:
        return request
    return structs.replace(request, request_id=request.selection_id or str(uuid4()))


def request_id_of(request_id: str | None, header: str | None) -> str | None:
    """A request's id: its own, or the header's. Raises InvalidFieldError for an unfit header."""
    if request_id is not None or header is None:
        return request_id
    return _fit(REQUEST_ID_HEADER, header)


def _fit(header: str, value: str) -> str:
    if not 1 <= len(value) <= MAX_ID_CHARACTERS:
        raise InvalidFieldError(header, f"{len(value)} characters", f"1 to {MAX_ID_CHARACTERS}")
    return value
