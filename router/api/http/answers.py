"""Responses, and the common shape of errors: `{"error": …, "code": …}` and the error's fields."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.replies import Decision
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


def warned(body: bytes, unknown: Sequence[str]) -> bytes:
    """Return a body with `warnings` about unknown fields, if it is an object."""
    if not unknown or not body.startswith(b"{"):
        return body
    warnings = msgspec.json.encode([warning(field) for field in unknown])
    return b'%s,"warnings":%s}' % (body[:-1], warnings)


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
    return Response(b"", 200, tuple(headers))


def _printable(text: str) -> bytes:
    return "".join(each for each in text if "!" <= each <= "~").encode()
