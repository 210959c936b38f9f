"""Responses, and the common shape of errors: `{"error": …, "code": …}` and the error's fields."""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.errors import KvRouterError
from router.protocol.replies import WARNINGS_HEADER, Decision
from router.runtime.kernels._json_numbers import as_json
from router.runtime.process.json_bodies import warning
from router.runtime.security.guarded import refusal_headers

log = logging.getLogger(__name__)


class Response(Struct, frozen=True, gc=False):
    """A JSON body, its status, and headers besides content type and length."""

    body: bytes
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()


INTERNAL = 500

OK = Response(b'{"status":"ok"}')


encode_reply = msgspec.json.Encoder(enc_hook=as_json).encode


def response(value: Any, status: int = 200) -> Response:
    """Return a response with a value as JSON."""
    return Response(encode_reply(value), status)


MOST_HEADER_BYTES = 4096
"""The limit of the header with warnings; the last warnings are left out beyond it."""


def warned(answer: Response, unknown: Sequence[str]) -> Response:
    """Return a response with `warnings` about unknown fields as well, wherever it has room."""
    sentences = [warning(field) for field in unknown]
    if not answer.body.startswith(b"{"):
        return with_warnings_header(answer, sentences)
    fields = msgspec.json.decode(answer.body, type=dict[str, msgspec.Raw])
    told = msgspec.json.decode(fields.get("warnings", _NONE), type=list[str])
    fields["warnings"] = msgspec.Raw(msgspec.json.encode([*told, *sentences]))
    return replace(answer, body=msgspec.json.encode(fields))


_NONE = msgspec.Raw(b"[]")


def with_warnings_header(answer: Response, sentences: Sequence[str]) -> Response:
    """Return a response with warnings in its header, after those that are there."""
    kept = tuple(each for each in answer.headers if each[0] != WARNINGS_HEADER)
    before = [json.loads(value) for name, value in answer.headers if name == WARNINGS_HEADER]
    told = [*(sentence for each in before for sentence in each), *sentences]
    while told and len(json.dumps(told)) > MOST_HEADER_BYTES:
        told.pop()
    if not told:
        return answer
    return replace(answer, headers=(*kept, (WARNINGS_HEADER, json.dumps(told).encode())))


def error_response(error: KvRouterError) -> Response:
    """Return the response to an error, and log the error."""
    log_refusal(error)
    return Response(msgspec.json.encode(error.body()), error.http_status, refusal_headers(error))


def log_refusal(error: KvRouterError) -> None:
    """Log a refusal; an internal error at level error."""
    is_ours = error.http_status == INTERNAL
    log.log(logging.ERROR if is_ours else logging.DEBUG, "refused (%s): %s", error.code, error)


ASKED = b"answer=headers"

ENDPOINT_HEADER = b"x-gateway-destination-endpoint"
"""Host and port, in the format of the Gateway API inference extension."""

DP_RANK_HEADER = b"x-data-parallel-rank"
"""The header that vLLM's server reads."""

WORKER_ID_HEADER = b"x-worker-id"
REQUEST_ID_HEADER = b"x-request-id"


def decision_response(query_string: bytes) -> Callable[[Decision], Response]:
    """Return the encoder of a decision that a query requests: headers or JSON."""
    if query_string and ASKED in query_string.split(b"&"):
        return header_response
    return response


def header_response(decision: Decision) -> Response:
    """Return a decision as headers, without a body.

    Endpoints lose their scheme and characters that no header may contain.
    """
    endpoint = decision.endpoint.partition("://")[2] or decision.endpoint
    headers = [
        (ENDPOINT_HEADER, _printable(endpoint.partition("/")[0])),
        (DP_RANK_HEADER, b"%d" % decision.dp_rank),
        (WORKER_ID_HEADER, b"%d" % decision.worker_id),
    ]
    if decision.request_id is not None:
        headers.append((REQUEST_ID_HEADER, _printable(decision.request_id)))
    return with_warnings_header(Response(b"", 200, tuple(headers)), decision.warnings)


def _printable(text: str) -> bytes:
    return "".join(each for each in text if "!" <= each <= "~").encode()
