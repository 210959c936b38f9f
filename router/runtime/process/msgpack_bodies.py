"""Unknown and duplicate fields of msgpack maps: the msgpack counterpart of `json_bodies.py`."""

from typing import Any

import msgspec
from msgspec import inspect

from router.errors import InvalidFieldError
from router.runtime.process.json_bodies import MAX_NAMES, names_of, structs_of, tags_of

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
    """The fields of a type, or of each type of a union. Thread-safe."""

    __slots__ = ("_own", "_tag", "_tagged")

    def __init__(self, body_type: Any) -> None:
        self._own = _Fields.of(body_type)
        self._tag, kinds = tags_of(body_type)
        self._tagged = {tag: _Fields.of(each) for tag, each in kinds.items()}

    def unknown(self, body: bytes) -> tuple[str, ...]:
        """Return the first names of top-level fields that the type does not have.

        `body`: the bytes from which a value of that type was decoded, so fields without nested
        maps, such as tokens, need no check. Raises InvalidFieldError for a duplicate field.
        """
        if not _is_map(body):
            return ()
        fields = _once(body)
        own = self._own
        if self._tag is not None:
            own = self._tagged[msgspec.msgpack.decode(fields[self._tag])]
        for name, value in fields.items():
            if name not in own.flat and not _is_each_once(value):
                _check_once(value)
        unknown = sorted(str(name) for name in fields.keys() - own.names)
        return tuple(name[:64] for name in unknown[:MAX_NAMES])


class _Fields(msgspec.Struct, frozen=True):
    """The names of fields, and of those whose values contain no map."""

    names: frozenset[str]
    flat: frozenset[str]

    @classmethod
    def of(cls, body_type: Any) -> "_Fields":
        """Return the fields of a type."""
        flat = (
            field.encode_name
            for each in structs_of(body_type)
            for field in inspect.type_info(each).fields  # type: ignore[attr-defined]
            if _is_flat(field.type)
        )
        return cls(names_of(body_type), frozenset(flat))


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


def _is_each_once(packed: msgspec.Raw) -> bool:
    """Return whether a value surely contains no duplicate field: a fast, conservative test.

    Whatever was decoded is encoded without duplicates, so the same bytes contain none either.
    """
    try:
        return bytes(packed) == msgspec.msgpack.encode(msgspec.msgpack.decode(packed))
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError):
        return False


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
