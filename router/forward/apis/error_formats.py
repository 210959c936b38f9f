"""Errors in the format of each API: our own, and engines' errors that came in another format."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from router.errors import KvRouterError
from router.forward.errors import error_response, error_status, reason_of
from router.protocol.values import UNREADABLE

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ErrorFormat(Struct, frozen=True):
    """The errors of one API.

    `reply`: status and body of our own error. `event`: our own error as the last event of a stream.
    `of_engine`: the body of an engine's error, by status and body.
    """

    reply: Callable[[KvRouterError], tuple[int, object]]
    event: Callable[[KvRouterError], bytes]
    of_engine: Callable[[int, bytes], bytes]


def _openai(error: KvRouterError) -> tuple[int, object]:
    return error_status(error), error_response(error)


def _openai_event(error: KvRouterError) -> bytes:
    return b"data: " + msgspec.json.encode(error_response(error)) + b"\n\n"


def _responses_event(error: KvRouterError) -> bytes:
    said: dict[str, Any] = {"type": "error", "code": error.code, "message": reason_of(error)}
    data = msgspec.json.encode({**said, "param": error.body().get("field"), "sequence_number": 0})
    return b"event: error\ndata: " + data + b"\n\n"


def _anthropic(error: KvRouterError) -> tuple[int, object]:
    status = error_status(error)
    return status, _anthropic_body(status, reason_of(error), code=error.code)


def _anthropic_event(error: KvRouterError) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(_anthropic(error)[1]) + b"\n\n"


def _anthropic_body(status: int, message: str, **more: str) -> dict[str, object]:
    usual = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(status, usual)
    return {"type": "error", "error": {"type": kind, "message": message, **more}}


def _in_openais(status: int, body: bytes) -> bytes:
    """Return an engine's error in OpenAI's format; one that is already, unchanged."""
    said = _object(body)
    if said is None or isinstance(said.get("error"), dict) or "message" in said:
        return body
    message = _message_in(said)
    if message is None:
        return body
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return msgspec.json.encode({"error": error})


def _in_anthropics(status: int, body: bytes) -> bytes:
    """Return an engine's error in Anthropic's format; one that is already, unchanged."""
    said = _object(body)
    if said is None or said.get("type") == "error":
        return body
    message = _message_in(said)
    return body if message is None else msgspec.json.encode(_anthropic_body(status, message))


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        said = msgspec.json.decode(body)
    except UNREADABLE:
        return None
    return said if isinstance(said, dict) else None


def _message_in(said: dict[str, Any]) -> str | None:
    """Return the message of an engine's error: OpenAI's, a bare text, or that of its framework."""
    error = said.get("error", said)
    for text in (error, *(error.get(n) for n in ("message", "detail") if isinstance(error, dict))):
        if isinstance(text, str):
            return text
    return None


OPENAI = ErrorFormat(_openai, _openai_event, _in_openais)
RESPONSES = ErrorFormat(_openai, _responses_event, _in_openais)
ANTHROPIC = ErrorFormat(_anthropic, _anthropic_event, _in_anthropics)
