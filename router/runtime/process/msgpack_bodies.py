"""Unknown and duplicate fields of msgpack maps: the msgpack counterpart of `json_bodies.py`."""

from typing import Any

import msgspec
from msgspec import inspect

from router.errors import InvalidFieldError
from router.runtime.process.json_bodies import MAX_NAMES, names_of, structs_of

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
    """The fields of a type. Thread-safe."""

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
        """Return the first names of top-level fields that the type does not have.

        `body`: the bytes from which a value of that type was decoded, so fields without nested
        maps, such as tokens, need no check. Raises InvalidFieldError for a duplicate field.
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
    """Return the fields of a map. Raises InvalidFieldError if one is duplicate."""
    fields = _fields(packed)
    count = _count(bytes(memoryview(packed)[:5]))
    if len(fields) < count:
        raise InvalidFieldError("body", "duplicate field", "each field once", status=422)
    return fields


def _check_once(packed: msgspec.Raw) -> None:
    """Raise InvalidFieldError for a duplicate field at any depth.

    Iterative: the depth is bounded, because the value was decoded before.
    """
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
    """Return the number of fields in a map's header."""
    if head[0] & 0xF0 == 0x80:
        return head[0] & 0x0F
    width = 2 if head[0] == 0xDE else 4
    return int.from_bytes(head[1 : 1 + width], "big")
