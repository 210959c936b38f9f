"""Decoding of request bodies to checked values; errors name the field and what is allowed."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect

from router.errors import InvalidFieldError
from router.runtime.process.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientGoneError,
    MalformedBodyError,
)

MAX_NAMES = 16
"""The limit of unknown fields that are named; a body may contain a million."""


MOST_NAMES = 1 << 19
"""The limit of fields and objects of one body; checking a million would take seconds."""


def check_names(body: bytes) -> None:
    """Raise InvalidFieldError if there are more than `MOST_NAMES` names. About 1 ms per MB."""
    if len(body) > MOST_NAMES and body.count(b":") + body.count(b"{") > MOST_NAMES:
        raise InvalidFieldError("body", "too many fields", f"at most {MOST_NAMES} in all")


class KnownFields:
    """The fields of a type, or of each type of a union. Thread-safe."""

    __slots__ = ("_fields", "_names", "_tag", "_tagged")

    def __init__(self, body_type: Any) -> None:
        self._names = names_of(body_type)
        self._tag, kinds = tags_of(body_type)
        self._tagged = {tag: names_of(each) for tag, each in kinds.items()}
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

    def unknown(self, body: bytes) -> tuple[str, ...]:
        """Return the first names of top-level fields that the type does not have.

        `body`: the bytes from which a value of that type was decoded. Takes about a microsecond if
        no value is nested. Raises InvalidFieldError for a duplicate field at any depth, and
        UnicodeDecodeError.
        """
        if not body.isascii():
            body.decode()
        if not self._names or not body.lstrip().startswith(b"{"):
            return ()
        fields = self._fields(body)
        if body.count(b":") > len(fields) and not _is_each_once(body):
            json.loads(body, object_pairs_hook=_check_once, parse_int=str, parse_float=str)
        names = self._names
        if self._tag is not None:
            names = self._tagged[msgspec.json.decode(fields[self._tag])]
        if fields.keys() <= names:
            return ()
        unknown = sorted(fields.keys() - names)
        return tuple(name[:64] for name in unknown[:MAX_NAMES])


def _is_each_once(body: bytes) -> bool:
    """Return whether the body surely contains no duplicate field: a fast, conservative test.

    Encoding the decoded body again removes duplicates and keeps one colon per field, so the number
    of colons is unchanged without duplicates. A body with a backslash could hide a colon or a name.
    """
    try:
        written = b"" if b"\\" in body else msgspec.json.encode(msgspec.json.decode(body))
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return False
    return written.count(b":") == body.count(b":")


def warning(field: str) -> str:
    """Return the warning about an ignored field."""
    return f"field {field!r} is unknown, and ignored"


def structs_of(body_type: Any) -> list[Any]:
    """Return the structs of a type: itself, or the members of a union."""
    kinds = getattr(body_type, "__args__", (body_type,))
    return [each for each in kinds if hasattr(each, "__struct_encode_fields__")]


def names_of(body_type: Any) -> frozenset[str]:
    """Return the field names of a struct, or of a union of structs, including its tag."""
    names: set[str] = set()
    for each in structs_of(body_type):
        names.update(each.__struct_encode_fields__)
        if each.__struct_config__.tag_field is not None:
            names.add(each.__struct_config__.tag_field)
    return frozenset(names)


def _as_list(array: Any) -> list[Any]:
    values: list[Any] = array.tolist()
    return values


def tags_of(body_type: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the tag field of a union of tagged structs, and its structs by their tags."""
    kinds = {each.__struct_config__.tag: each for each in structs_of(body_type)}
    if None in kinds or not kinds:
        return None, {}
    return next(iter(kinds.values())).__struct_config__.tag_field, kinds


def with_warnings(reply: Any, unknown: Sequence[str]) -> Any:
    """Return a reply with `warnings` about unknown fields as well, if it is an object."""
    built = msgspec.to_builtins(reply, enc_hook=_as_list) if unknown else reply
    if unknown and isinstance(built, dict):
        sentences = [*built.get("warnings", ()), *map(warning, unknown)]
        return {**built, "warnings": sentences}
    return reply


def _check_once(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidFieldError(name[:64], "duplicate field", "once", status=422)
        seen.add(name)


T = TypeVar("T")

THREAD_BYTES = 65_536
"""Size above which a body is decoded on another thread, so that it does not delay others."""

JSON = "valid JSON in UTF-8"

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.S)


async def read_body(chunks: AsyncIterator[bytes], limit_bytes: int, timeout_s: float) -> bytes:
    """Read a whole body. Raises BodyTooLargeError (at once), BodyTimeoutError, ClientGoneError."""
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
    """A reader of JSON bodies of one type. Thread-safe."""

    __slots__ = ("_decode", "_known")

    def __init__(self, body_type: type[T]) -> None:
        self._decode: Callable[[bytes], T] = msgspec.json.Decoder(body_type).decode
        self._known = KnownFields(body_type)

    async def read(self, body: bytes, unknown: list[str]) -> T:
        """Return the checked value, and add the names of unknown fields to `unknown`.

        Raises MalformedBodyError, InvalidFieldError. Decodes a long body on another thread.
        """
        if len(body) > THREAD_BYTES:
            return await asyncio.to_thread(self.read_now, body, unknown)
        return self.read_now(body, unknown)

    def read_now(self, body: bytes, unknown: list[str]) -> T:
        """Return the checked value as `read` does, on this thread."""
        check_names(body)
        value = decode_now(self._decode, body)
        unknown += decode_now(self._known.unknown, body)
        return value


async def decode_body(decoder: Callable[[bytes], T], body: bytes, allowed: str = JSON) -> T:
    """Return a checked value. Raises MalformedBodyError, InvalidFieldError."""
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(decode_now, decoder, body, allowed)
    return decode_now(decoder, body, allowed)


def decode_now(decoder: Callable[[bytes], T], body: bytes, allowed: str = JSON) -> T:
    """Return a checked value as `decode_body` does, on this thread."""
    try:
        return decoder(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBodyError(str(error), allowed) from error


def _invalid_field(text: str) -> InvalidFieldError:
    """Convert a msgspec message to an error.

    The messages are «Expected X, got Y - at `$.path`», «Object missing required field `f`» or
    «Object contains unknown field `f`».
    """
    reason, _, place = text.partition(" - at `$")
    path = place.removesuffix("`").removeprefix(".")
    missing = _MISSING.fullmatch(reason)
    if missing:
        field = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidFieldError(field, "missing", "a value, see /docs", status=422)
    if unknown := _UNKNOWN.fullmatch(reason):
        problem = f"unknown field {unknown[1]!r}"
        return InvalidFieldError(path or "body", problem, "those that /docs lists", status=422)
    expected, _, got = reason.removeprefix("Expected ").partition(", got ")
    problem = f"got {got}" if got else "not allowed"
    return InvalidFieldError(path or "body", problem, expected, status=422)
