"""Request bodies, from bytes to checked values; the errors name the field and what is allowed."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect

from router.body_errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientGoneError,
    MalformedBodyError,
)
from router.errors import InvalidFieldError
from router.process.fields import KnownFields, check_names

T = TypeVar("T")

THREAD_BYTES = 65_536
"""Longer bodies are decoded on another thread, so that they do not hold up short ones."""

JSON = "valid JSON in UTF-8"

_MISSING = re.compile(r"Object missing required field `(\w+)`")


async def read_body(chunks: AsyncIterator[bytes], limit_bytes: int, timeout_s: float) -> bytes:
    """A whole body. Raises BodyTooLargeError (at once), BodyTimeoutError, ClientGoneError."""
    received, size_bytes = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in chunks:
                received.append(chunk)
                size_bytes += len(chunk)
                if size_bytes > limit_bytes:
                    raise BodyTooLargeError(limit_bytes)
    except TimeoutError as error:
        raise BodyTimeoutError(timeout_s) from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return b"".join(received)


class JsonReader(Generic[T]):
    """Reads JSON bodies of one type. May be used by several threads at once."""

    __slots__ = ("_decode", "_known")

    def __init__(self, body_type: type[T]) -> None:
        self._decode: Callable[[bytes], T] = msgspec.json.Decoder(body_type).decode
        self._known = KnownFields(body_type)

    async def read(self, body: bytes, unknown: list[str]) -> T:
        """A checked value; fields that nobody knows are added to `unknown`. Raises
        MalformedBodyError, InvalidFieldError.
        """
        if len(body) > THREAD_BYTES:
            return await asyncio.to_thread(self.read_now, body, unknown)
        return self.read_now(body, unknown)

    def read_now(self, body: bytes, unknown: list[str]) -> T:
        """The same, on this thread."""
        check_names(body)
        value = decode_now(self._decode, body)
        unknown += decode_now(self._known.unknown, body)
        return value


async def decode_body(decoder: Callable[[bytes], T], body: bytes, allowed: str = JSON) -> T:
    """A checked value. Raises MalformedBodyError, InvalidFieldError."""
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(decode_now, decoder, body, allowed)
    return decode_now(decoder, body, allowed)


def decode_now(decoder: Callable[[bytes], T], body: bytes, allowed: str = JSON) -> T:
    """The same, on this thread."""
    try:
        return decoder(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBodyError(str(error), allowed) from error


def _invalid_field(text: str) -> InvalidFieldError:
    """msgspec says «Expected X, got Y - at `$.path`» or «Object missing required field `f`»."""
    reason, _, place = text.partition(" - at `$")
    path = place.removesuffix("`").removeprefix(".")
    missing = _MISSING.fullmatch(reason)
    if missing:
        field = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidFieldError(field, "missing", "a value; /docs says which", status=422)
    expected, _, got = reason.removeprefix("Expected ").partition(", got ")
    problem = f"got {got}" if got else "not allowed"
    return InvalidFieldError(path or "body", problem, expected, status=422)
