"""Requests with a prompt, in JSON or with packed tokens.

    application/json           {"token_ids": […], "model_name": "m", …}
    application/octet-stream   tokens as little-endian u32, the rest as query parameters:
                               ?model_name=m&explain=true&allowed_worker_ids=[1,2]

A parameter of a text field is the text, a parameter of any other field is JSON.
"""

import re
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import parse_qsl

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import inspect
from msgspec.structs import force_setattr

from router.errors import InvalidFieldError
from router.protocol.requests import PromptRequest
from router.runtime.http_server.exchange import JSON, Exchange
from router.runtime.kernels._json_tokens import find_tokens
from router.runtime.process.errors import MalformedBodyError
from router.runtime.process.json_bodies import JsonReader, KnownFields, check_names

_ID = "~request id~"
"""The place of a request id in a template. Ids with such characters stay in their body."""
_ID_BYTES = _ID.encode()
_find_id = re.compile(rb'"request_id":\s{0,4}"([\w.:-]{1,256})"', re.ASCII).search

S = TypeVar("S")
T = TypeVar("T", bound=PromptRequest)

Tokens: TypeAlias = npt.NDArray[np.uint32]

TOKEN_BYTES = 4
_U8, _U32 = np.dtype(np.uint8), np.dtype(np.uint32)

MOST_TEMPLATES, MOST_BYTES = 256, 1024
"""Limits of cached templates: their number, and the length of each in bytes."""


class TokenRequests(Generic[T]):
    """A reader of requests of one type. Thread-safe.

    It caches templates: callers repeat the rest of a body, or the query beside it, verbatim, except
    for its `request_id`. A template maps these words to the decoded request without tokens and id,
    and to its unknown fields.
    """

    def __init__(self, body_type: type[T]) -> None:
        self._templates: dict[bytes, tuple[T, list[str]]] = {}
        self._query_templates: dict[bytes, tuple[T, list[str]]] = {}
        self._decode = msgspec.json.Decoder(body_type).decode
        self._known = KnownFields(body_type)
        self._whole = JsonReader(body_type)
        self._texts = text_fields(body_type)

    def read(self, exchange: Exchange) -> T:
        """Return a checked request. Raises MalformedBodyError, InvalidFieldError."""
        body, exchange.received = bytes(exchange.received), b""
        if exchange.head.media_type == JSON:
            return self.decode(body, exchange.unknown)
        return self._packed(body, exchange.head.query, exchange.unknown)

    def decode(self, body: bytes, unknown: list[str]) -> T:
        """Return the checked request of a JSON body, with its tokens as an array.

        Unknown fields are added to `unknown`. Raises MalformedBodyError, InvalidFieldError.
        """
        room = np.empty(len(body) // 2 + 1, _U32)
        count, start, end = find_tokens(np.frombuffer(body, _U8), room)
        if count < 0:  # the tokens are not plainly an array
            return self._whole.read_now(body, unknown)
        found = _find_id(body, end) or _find_id(body, 0, start)
        if found is None:
            words = b"%b[]%b" % (body[:start], body[end:])
        else:
            at, to = found.span(1)
            if at > start:
                words = b"%b[]%b%b%b" % (body[:start], body[end:at], _ID_BYTES, body[to:])
            else:
                words = b"%b%b%b[]%b" % (body[:at], _ID_BYTES, body[to:start], body[end:])
        template = self._templates.get(words)
        if template is None:
            try:
                template = _kept(self._templates, words, self._read_words(words))
            except (ValueError, RecursionError):
                return self._whole.read_now(body, unknown)  # raises the errors of a full decode
        request = _filled(template, room[:count].copy(), unknown)
        if found is not None:
            force_setattr(request, "request_id", found[1].decode())
        return request

    def _read_words(self, words: bytes) -> tuple[T, list[str]]:
        """Return a template. Raises ValueError if it is invalid, or if the id is a nested one."""
        check_names(words)
        request = self._decode(words)
        if _ID_BYTES in words and (
            getattr(request, "request_id", None) != _ID or words.count(_ID_BYTES) > 1
        ):
            raise ValueError("an id elsewhere")
        return request, [*self._known.unknown(words)]

    def _packed(self, body: bytes, query: bytes, unknown: list[str]) -> T:
        if len(body) % TOKEN_BYTES:
            reason = f"{len(body)} bytes"
            raise InvalidFieldError("body", reason, "little-endian u32 tokens, 4 bytes each")
        template = self._query_templates.get(query)
        if template is None:
            fields: list[str] = []
            request = self._whole.read_now(self._as_json(query), fields)
            template = _kept(self._query_templates, query, (request, fields))
        return _filled(template, np.frombuffer(body, "<u4"), unknown)

    def _as_json(self, query: bytes) -> bytes:
        """Return a query as a JSON object."""
        try:
            pairs = parse_qsl(query.decode(), keep_blank_values=True, errors="strict")
        except UnicodeDecodeError as error:
            raise MalformedBodyError(f"query: {error}") from error
        fields: dict[str, Any] = {}
        for name, value in pairs:
            if name == "answer":
                continue  # a parameter of the response's format, not a field
            if name in fields or name == "token_ids":
                raise InvalidFieldError(name, "given twice", "once; the body is the tokens")
            fields[name] = value if name in self._texts else _json_value(name, value)
        return msgspec.json.encode(fields)


def _kept(templates: dict[bytes, S], words: bytes, template: S) -> S:
    """Cache a template, and return it."""
    if len(words) <= MOST_BYTES:
        if len(templates) >= MOST_TEMPLATES:
            templates.clear()
        templates[words] = template
    return template


def _filled(template: tuple[T, list[str]], tokens: Tokens, unknown: list[str]) -> T:
    """Return the request of a template with these tokens."""
    without, fields = template
    if fields:
        unknown += fields
    request: T = without.__copy__()  # type: ignore[attr-defined]
    force_setattr(request, "token_ids", tokens)
    return request


def text_fields(body_type: type[msgspec.Struct]) -> frozenset[str]:
    """Return the text fields of a type, by their names on the wire."""
    described = inspect.type_info(body_type)
    assert isinstance(described, inspect.StructType)
    return frozenset(field.encode_name for field in described.fields if _is_text(field.type))


def _is_text(kind: inspect.Type) -> bool:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return all(
        all(isinstance(value, str) for value in each.values)
        if isinstance(each, inspect.LiteralType)
        else isinstance(each, inspect.StrType | inspect.NoneType)
        for each in kinds
    )


def _json_value(name: str, value: str) -> msgspec.Raw:
    """Return a parameter that is no text, or unknown, as JSON. Raises InvalidFieldError."""
    try:
        msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidFieldError(name, f"{value!r} is not JSON", "JSON, as in a body") from error
    return msgspec.Raw(value.encode())
