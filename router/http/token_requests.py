"""Requests with a prompt, in either of their forms.

    application/json           {"token_ids": […], "model_name": "m", …}
    application/octet-stream   tokens as little-endian u32, the rest as query parameters:
                               ?model_name=m&explain=true&allowed_worker_ids=[1,2]

A parameter is the field's text, or where the field is no text, its JSON.
"""

from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec
import numpy as np
from msgspec import inspect

from router.body_errors import MalformedBodyError, UnsupportedMediaTypeError
from router.errors import InvalidFieldError
from router.http.exchange import BINARY, JSON, Exchange
from router.process.bodies import JsonReader
from router.protocol.requests import PromptRequest
from router.token_bodies import TOKEN_BYTES, Remembered, TokenBodyDecoder

T = TypeVar("T", bound=PromptRequest)


class TokenRequests(Generic[T]):
    """Reads requests of one type. May be used by several threads at once. `tokens` reads JSON;
    `said`: the queries that came.
    """

    def __init__(self, body_type: type[T]) -> None:
        self.tokens = TokenBodyDecoder(body_type)
        self._queries = JsonReader(body_type)
        self._texts = text_fields(body_type)
        self.said = Remembered(self._read_query)

    def read(self, exchange: Exchange) -> T:
        """A checked request. Raises UnsupportedMediaTypeError, MalformedBodyError,
        InvalidFieldError.
        """
        media_type = exchange.head.media_type
        if media_type == JSON:
            return self.tokens.decode(exchange.body, exchange.unknown)
        if media_type == BINARY:
            return self._binary(exchange)
        raise UnsupportedMediaTypeError(exchange.header(b"content-type"), (JSON, BINARY))

    def _binary(self, exchange: Exchange) -> T:
        odd_bytes = len(exchange.body) % TOKEN_BYTES
        if odd_bytes:
            reason = f"{len(exchange.body)} bytes"
            raise InvalidFieldError("body", reason, "little-endian u32 tokens, 4 bytes each")
        tokens = np.frombuffer(exchange.body, "<u4")
        return self.said.with_tokens(exchange.head.query_string, tokens, exchange.unknown)

    def _read_query(self, query: bytes, unknown: list[str]) -> T:
        return self._queries.read_now(self._as_json(query), unknown)

    def _as_json(self, query: bytes) -> bytes:
        """What a query says, as a JSON object."""
        try:
            said = parse_qsl(query.decode(), keep_blank_values=True, errors="strict")
        except UnicodeDecodeError as error:
            raise MalformedBodyError(f"query: {error}") from error
        fields: dict[str, Any] = {}
        for name, value in said:
            if name == "answer":
                continue  # which is not about the request
            if name in fields or name == "token_ids":
                raise InvalidFieldError(name, "said twice", "once; the body is the tokens")
            fields[name] = value if name in self._texts else _json_value(name, value)
        return msgspec.json.encode(fields)


def text_fields(body_type: type[msgspec.Struct]) -> frozenset[str]:
    """Fields whose values are texts, by their names on the wire."""
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
    """A parameter that is not a text, or that nobody knows, which may be anything."""
    try:
        msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidFieldError(name, f"{value!r} is no JSON", "JSON, as in a body") from error
    return msgspec.Raw(value.encode())
