"""What `fields.py` finds in JSON, in msgpack: fields nobody knows, and those there twice."""

from typing import Any

import msgspec
from msgspec import inspect

from router.errors import InvalidFieldError
from router.process.fields import MAX_NAMES, names_of, structs_of

_FLAT = (
    inspect.IntType,
    inspect.FloatType,
    inspect.BoolType,
    inspect.StrType,
    inspect.BytesType,
    inspect.NoneType,
    inspect.LiteralType,
    inspect.EnumType,
)
_fields = msgspec.msgpack.Decoder(dict[Any, msgspec.Raw]).decode
_items = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class PackedFields:
    """The fields of a type. May be used by several threads at once."""

    __slots__ = ("_flat", "_names")

    def __init__(self, body_type: Any) -> None:
        self._names = names_of(body_type)
        self._flat = frozenset(
            field.encode_name
            for each in structs_of(body_type)
            for field in inspect.type_info(each).fields  # type: ignore[attr-defined]
            if _is_flat(field.type)
        )

    def unknown(self, body: bytes) -> tuple[str, ...]:
        """The top-level fields that the type does not have, by name; the first of them.

        `body`: what that type was decoded from, so that fields which have no fields themselves, as
        tokens, need not be looked into. Raises InvalidFieldError where a field is there twice.
        """
        if not _is_map(body):
            return ()
        fields = _once(body)
        for name, value in fields.items():
            if name not in self._flat:
                _check_once(value)
        unknown = sorted(str(name) for name in fields.keys() - self._names)
        return tuple(name[:64] for name in unknown[:MAX_NAMES])


def _is_flat(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return all(map(_is_flat, kind.types))
    if isinstance(kind, inspect.ListType):
        return _is_flat(kind.item_type)
    return isinstance(kind, _FLAT)


def _once(packed: bytes | msgspec.Raw) -> dict[Any, msgspec.Raw]:
    """The fields of a map, each of which is there once."""
    fields = _fields(packed)
    count = _count(bytes(memoryview(packed)[:5]))
    if len(fields) < count:
        raise InvalidFieldError("body", "a field is there twice", "each field once", status=422)
    return fields


def _check_once(packed: msgspec.Raw) -> None:
    """Of all that is in there, however deep; not deeper than what was decoded before."""
    waiting = [packed]
    while waiting:
        value = waiting.pop()
        if _is_map(value):
            waiting += _once(value).values()
        elif _is_list(value):
            waiting += _items(value)


def _is_map(packed: bytes | msgspec.Raw) -> bool:
    code = memoryview(packed)[0]
    return code & 0xF0 == 0x80 or code in (0xDE, 0xDF)


def _is_list(packed: bytes | msgspec.Raw) -> bool:
    code = memoryview(packed)[0]
    return code & 0xF0 == 0x90 or code in (0xDC, 0xDD)


def _count(head: bytes) -> int:
    """How many fields a map says it has."""
    if head[0] & 0xF0 == 0x80:
        return head[0] & 0x0F
    width = 2 if head[0] == 0xDE else 4
    return int.from_bytes(head[1 : 1 + width], "big")
