"""Requests with a prompt, in JSON or with packed tokens.

    application/json           {"token_ids": […], "model_name": "m", …}
    application/octet-stream   tokens as little-endian u32, the rest as query parameters:
                               ?model_name=m&explain=true&allowed_worker_ids=[1,2]

A parameter of a text field is the text, a parameter of any other field is JSON.
"""

from collections.abc import Hashable
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import parse_qsl

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import inspect
from msgspec.structs import force_setattr

from router.errors import InvalidFieldError
from router.runtime.http_server.exchange import JSON, Exchange
from router.runtime.kernels._json_tokens import NO_SHAPE, find_tokens
from router.runtime.process.errors import MalformedBodyError
from router.runtime.process.json_bodies import JsonReader, KnownFields, check_names, structs_of

K = TypeVar("K", bound=Hashable)
S = TypeVar("S")
T = TypeVar("T", bound=msgspec.Struct)

Tokens: TypeAlias = npt.NDArray[np.uint32]

TOKEN_BYTES = 4
_U8, _U32 = np.dtype(np.uint8), np.dtype(np.uint32)

MOST_KNOWN, MOST_BYTES = 256, 1024
"""Limits of what is cached: the number of shapes and of queries, and their length in bytes."""


class TokenRequests(Generic[T]):
    """A reader of requests of one type, or of a union of types. Thread-safe.

    It caches which names and brackets of bodies are without fault, and the requests of queries:
    callers repeat these verbatim.
    """

    def __init__(self, body_type: type[T]) -> None:
        self._unknown: dict[tuple[type, int], tuple[str, ...]] = {}
        self._queries: dict[bytes, tuple[T, list[str]]] = {}
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
        if b'"token_ids"' not in body:
            return self._whole.read_now(body, unknown)
        room = np.empty(len(body) // 2 + 1, _U32)
        count, start, end, shape = find_tokens(np.frombuffer(body, _U8), room)
        if count < 0:  # the tokens are not plainly an array
            return self._whole.read_now(body, unknown)
        words = b"%b[]%b" % (body[:start], body[end:])
        try:
            request: T = self._decode(words)
            names = self._unknown.get((type(request), shape))
            if names is None or not words.isascii():
                names = self._check(request, words, shape)
        except (ValueError, RecursionError):
            return self._whole.read_now(body, unknown)  # raises the errors of a full decode
        if names:
            unknown += names
        force_setattr(request, "token_ids", room[:count].copy())
        return request

    def tokens_in(self, written: bytes) -> Tokens:
        """Return the tokens of a JSON array. Raises MalformedBodyError, InvalidFieldError."""
        body = b'{"token_ids":%b}' % written
        room = np.empty(len(body) // 2 + 1, _U32)
        count, _, end, _ = find_tokens(np.frombuffer(body, _U8), room)
        if count < 0 or end != len(body) - 1:  # the tokens are not plainly an array
            tokens: Tokens = self._whole.read_now(body, []).token_ids  # type: ignore[attr-defined]
            return tokens
        return room[:count]

    def _check(self, request: T, words: bytes, shape: int) -> tuple[str, ...]:
        """Return the unknown fields of a body.

        Raises InvalidFieldError for a duplicate field, ValueError for a request without a prompt.
        """
        if not hasattr(request, "token_ids"):
            raise ValueError("tokens are an unknown field of this request")
        check_names(words)
        names = self._known.unknown(words)
        if shape != NO_SHAPE and not names:
            _keep(self._unknown, (type(request), shape), names, len(words))
        return names

    def _packed(self, body: bytes, query: bytes, unknown: list[str]) -> T:
        if len(body) % TOKEN_BYTES:
            reason = f"{len(body)} bytes"
            raise InvalidFieldError("body", reason, "little-endian u32 tokens, 4 bytes each")
        known = self._queries.get(query)
        if known is None:
            fields: list[str] = []
            known = self._whole.read_now(self._as_json(query), fields), fields
            _keep(self._queries, query, known, len(query))
        without, names = known
        if names:
            unknown += names
        request: T = without.__copy__()  # type: ignore[attr-defined]
        force_setattr(request, "token_ids", np.frombuffer(body, "<u4"))
        return request

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


def _keep(known: dict[K, S], key: K, value: S, size_bytes: int) -> None:
    """Cache a value, unless it is that of a long body."""
    if size_bytes <= MOST_BYTES:
        if len(known) >= MOST_KNOWN:
            known.clear()
        known[key] = value


def text_fields(body_type: Any) -> frozenset[str]:
    """Return the text fields of a type, or of a union of types, by their names on the wire."""
    return frozenset(
        field.encode_name
        for each in structs_of(body_type)
        for field in inspect.type_info(each).fields  # type: ignore[attr-defined]
        if _is_text(field.type)
    )


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
