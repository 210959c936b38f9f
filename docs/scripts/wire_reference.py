"""docs/wire.md: every type that crosses a socket, as the process decodes it."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import msgspec
from msgspec import Struct
from msgspec import inspect as types

HEAD = """# Wire protocol

Made from the types in `router/protocol` by `make docs`: what is sent, and what is accepted. Unknown fields
are ignored. Bytes of each are held by `tests/router/protocol/test_golden.py`; HTTP is also at
`GET /openapi.json` of a running router. Subjects, and who may publish there: [SECURITY.md](../SECURITY.md#nats-subjects).

`*`: required. Arrays have their fields in the order of the table; fields may be appended, never reordered.

"""
PLACES = {
    "events": "stream `kv-{namespace}-events`, subject `kv.{namespace}.events.{worker}.{rank}`; msgpack",
    "loads": "subjects `kv.{namespace}.load.{worker}.{rank}`, and asked for `kv.{namespace}.worker.{worker}.{rank}.load`; msgpack",
    "ranges": "subject `kv.{namespace}.worker.{worker}.{rank}.events`; msgpack",
    "replicas": "subjects `kv.{namespace}.sequences.{router}` and `….inbox`, without a bus `POST /replica_sync/stream`; msgpack",
    "prefills": "subject `kv.{namespace}.prefill`; msgpack",
    "catalogue": "bucket `kv-{namespace}-workers`; JSON",
    "requests": "HTTP of a router, and inside of its NATS methods; JSON",
    "batches": "`POST /select:batch`, `/reservations:batch`; JSON",
    "commands": "subject `kv.{namespace}.router`; JSON or msgpack",
    "replies": "what routers answer, over HTTP and NATS; JSON",
    "workers": "`/workers` of a router; JSON",
    "index_service": "HTTP of the index alone, subject `kv.{namespace}.indexer.query`; JSON",
    "dumps": "`GET /dump`; JSON",
    "hybrid": "in messages of `events`, and in registrations of `workers`",
    "values": "what the others are made of",
}
"""Modules of router.protocol in reading order, and where their types are sent."""


def wire() -> str:
    """Return the text of the page."""
    return HEAD + "\n".join(_section(name, place) for name, place in PLACES.items())


def _section(name: str, place: str) -> str:
    module = import_module(f"router.protocol.{name}")
    return "\n".join(
        [f"## {name}", "", f"{_sentence(place)}.", "", *map(_struct, _structs(module))]
    )


def _structs(module: ModuleType) -> Iterator[type[Struct]]:
    """In the order of the source."""
    for each in vars(module).values():
        is_struct = inspect.isclass(each) and issubclass(each, Struct)
        if is_struct and each.__module__ == module.__name__ and not each.__name__.startswith("_"):
            yield each


def _struct(each: type[Struct]) -> str:
    info = types.type_info(each)
    assert isinstance(info, types.StructType)
    tag = f", tag `{info.tag}`" + (f" in `{info.tag_field}`" if info.tag_field else "")
    kind = ("array" if info.array_like else "map") + (tag if info.tag is not None else "")
    rows = [
        f"| `{field.encode_name}`{'*' if field.required else ''} | {_spelled(field.type)} | {_default(field)} |"
        for field in info.fields
    ]
    table = ["| field | type | default |", "|---|---|---|", *rows] if rows else ["No fields."]
    return "\n".join([f"### {each.__name__}", "", f"({kind}) {_doc(each)}", "", *table, ""])


def _doc(each: type[Struct]) -> str:
    text = inspect.cleandoc(each.__doc__ or "")
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def _default(field: types.Field) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f"`{_json(field.default)}`"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{_json(field.default_factory())}`"
    return ""


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


NAMES = {
    types.AnyType: "anything",
    types.BoolType: "bool",
    types.BytesType: "bytes",
    types.DateTimeType: "date and time",
    types.FloatType: "float",
    types.IntType: "int",
    types.NoneType: "null",
    types.StrType: "str",
}


def _spelled(kind: types.Type) -> str:
    """Describe a type, with its bounds."""
    if type(kind) in SPELLED:
        return SPELLED[type(kind)](kind)
    return f"{NAMES[type(kind)]}{_bounds(kind)}"


def _list(kind: types.Type) -> str:
    return f"list of {_spelled(kind.item_type)}{_bounds(kind)}"


def _linked(kind: types.Type) -> str:
    name = kind.cls.__name__
    if kind.cls.__module__.startswith("router.protocol."):
        return f"[{name}](#{name.lower()})"
    return "{" + ", ".join(f"`{each.encode_name}`" for each in kind.fields) + "}"


SPELLED = {
    types.Metadata: lambda kind: _spelled(kind.type),
    types.UnionType: lambda kind: " or ".join(map(_spelled, kind.types)),
    types.StructType: _linked,
    types.ListType: _list,
    types.VarTupleType: _list,
    types.TupleType: lambda kind: f"[{', '.join(map(_spelled, kind.item_types))}]",
    types.DictType: lambda kind: f"map of {_spelled(kind.key_type)} to {_spelled(kind.value_type)}",
    types.LiteralType: lambda kind: " or ".join(f"`{_json(each)}`" for each in kind.values),
    types.EnumType: lambda kind: " or ".join(f"`{each.value}`" for each in kind.cls),
    types.RawType: lambda _: "anything",
    types.CustomType: lambda _: "anything",
}


def _bounds(kind: types.Type) -> str:
    words = {
        "ge": "≥ ", "gt": "> ", "le": "≤ ", "lt": "< ", "min_length": "length ≥ ",
        "max_length": "length ≤ ", "pattern": "like ",
    }  # fmt: skip
    said = [
        f"{word}{_escaped(getattr(kind, name))}"
        for name, word in words.items()
        if getattr(kind, name, None) is not None
    ]
    return f" ({', '.join(said)})" if said else ""


def _escaped(bound: object) -> str:
    return f"`{bound}`".replace("|", "\\|") if isinstance(bound, str) else f"{bound:,}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
