"""Request fields from headers, and request ids."""

from collections.abc import Mapping
from itertools import chain
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import structs

from router.errors import InvalidFieldError
from router.protocol.requests import MOST_MS, Milliseconds, SelectRequest

MAX_ID_CHARACTERS = 256
REQUEST_ID_HEADER = "x-request-id"
SELECT_HEADERS = {
    "request_id": REQUEST_ID_HEADER,
    "policy_class": "x-dynamo-meta-policy-class",
    "tenant": "x-llm-d-inference-fairness-id",
    "session_id": "x-dynamo-session-id",
}
"""Request fields that gateways put into headers, as Dynamo and llm-d name them."""

OBJECTIVE_HEADERS = {
    "slo_ttft_ms": ("x-kv-router-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "slo_tpot_ms": ("x-kv-router-slo-tpot-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
}
"""Headers with objectives: ours, llm-d's, and its older ones. The first that is there applies."""

READ_HEADERS = (*SELECT_HEADERS.values(), *chain.from_iterable(OBJECTIVE_HEADERS.values()))
"""All headers that fields of a request are read from."""


def with_header_fields(request: SelectRequest, headers: Mapping[str, str]) -> SelectRequest:
    """Return a request with its unset fields taken from headers.

    `headers`: those of `READ_HEADERS`, and perhaps others. Raises InvalidFieldError for an invalid
    header.
    """
    if not headers:
        return with_request_id(request, None)
    fields: dict[str, Any] = {
        field: _fit(header, headers[header])
        for field, header in SELECT_HEADERS.items()
        if header in headers and getattr(request, field) is None
    }
    asked = objectives_in(headers)
    fields |= {name: each for name, each in asked.items() if getattr(request, name) is None}
    request_id = fields.pop("request_id", None)
    return with_request_id(structs.replace(request, **fields) if fields else request, request_id)


def objectives_in(headers: Mapping[str, str]) -> dict[str, float]:
    """Return the objectives in headers, by their fields. Raises InvalidFieldError."""
    found = {}
    for field, names in OBJECTIVE_HEADERS.items():
        name = next((each for each in names if each in headers), None)
        if name is not None:
            found[field] = _milliseconds(name, headers[name])
    return found


def _milliseconds(header: str, value: str) -> float:
    try:
        return msgspec.convert(value.strip(), Milliseconds, strict=False)
    except msgspec.ValidationError as error:
        allowed = f"milliseconds, above 0, at most {MOST_MS}"
        raise InvalidFieldError(header, repr(value[:64]), allowed, status=422) from error


def with_request_id(request: SelectRequest, header_id: str | None) -> SelectRequest:
    """Return a request with its id: of the selection, else its own, else the header's."""
    request_id = request.selection_id or request.request_id or header_id
    if request_id == request.request_id:
        return request
    return structs.replace(request, request_id=request_id)


def bookable(request: SelectRequest) -> SelectRequest:
    """Return the request, with a new id if it has none."""
    if request.request_id is not None:
        return request
    return structs.replace(request, request_id=request.selection_id or str(uuid4()))


def request_id_of(request_id: str | None, header: str | None) -> str | None:
    """Return the request id, or else the header's. Raises InvalidFieldError if that is invalid."""
    if request_id is not None or header is None:
        return request_id
    return _fit(REQUEST_ID_HEADER, header)


def _fit(header: str, value: str) -> str:
    if not 1 <= len(value) <= MAX_ID_CHARACTERS:
        raise InvalidFieldError(header, f"{len(value)} characters", f"1 to {MAX_ID_CHARACTERS}")
    return value
