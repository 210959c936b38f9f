"""The fields of a JSON object: those that nobody knows, and those that are there twice."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from router.errors import InvalidFieldError

MAX_NAMES = 16
"""Unknown fields that are named; a body may have a million."""


MOST_NAMES = 1 << 19
"""Fields and objects of one body together; a million would take seconds to look at."""


def check_names(body: bytes) -> None:
    """Raises InvalidFieldError where there are more names than anybody writes. A ms per MB."""
    if len(body) > MOST_NAMES and body.count(b":") + body.count(b"{") > MOST_NAMES:
        raise InvalidFieldError("body", "too many fields", f"at most {MOST_NAMES} in all")


class KnownFields:
    """The fields of a type. May be used by several threads at once."""

    __slots__ = ("_fields", "_names")

    def __init__(self, body_type: Any) -> None:
        self._names = names_of(body_type)
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

    def unknown(self, body: bytes) -> tuple[str, ...]:
        """The top-level fields that the type does not have, by name; the first of them.

        `body`: what that type was decoded from. A microsecond, if nothing in it is nested. Raises
        InvalidFieldError where a field is there twice, at any depth, and UnicodeDecodeError.
        """
        if not body.isascii():
            body.decode()
        if not self._names or not body.lstrip().startswith(b"{"):
            return ()
        fields = self._fields(body)
        if body.count(b":") > len(fields) and not _is_each_once(body):
            json.loads(body, object_pairs_hook=_check_once, parse_int=str, parse_float=str)
        if fields.keys() <= self._names:
            return ()
        unknown = sorted(fields.keys() - self._names)
        return tuple(name[:64] for name in unknown[:MAX_NAMES])


def _is_each_once(body: bytes) -> bool:
    """Whether it is plain that no object says a field twice: each field has the one colon it needs,
    as it has when it is written anew. Without a backslash, nothing hides one.
    """
    try:
        written = b"" if b"\\" in body else msgspec.json.encode(msgspec.json.decode(body))
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return False
    return written.count(b":") == body.count(b":")


def warning(field: str) -> str:
    """What a caller is told of a field that is passed over."""
    return f"field {field!r} is unknown, and ignored"


def structs_of(body_type: Any) -> list[Any]:
    """A struct, or the structs of a union."""
    kinds = getattr(body_type, "__args__", (body_type,))
    return [each for each in kinds if hasattr(each, "__struct_encode_fields__")]


def names_of(body_type: Any) -> frozenset[str]:
    """The fields that a struct, or a union of them, has in a body; its tag is one of them."""
    names: set[str] = set()
    for each in structs_of(body_type):
        names.update(each.__struct_encode_fields__)
        if each.__struct_config__.tag_field is not None:
            names.add(each.__struct_config__.tag_field)
    return frozenset(names)


def with_warnings(reply: Any, unknown: Sequence[str]) -> Any:
    """A reply to a body with fields that nobody knows: an object says so in `warnings`."""
    said = msgspec.to_builtins(reply) if unknown else reply
    if unknown and isinstance(said, dict):
        return {**said, "warnings": [warning(field) for field in unknown]}
    return reply


def _check_once(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidFieldError(name[:64], "there twice", "once", status=422)
        seen.add(name)
