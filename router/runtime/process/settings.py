"""Settings as rows of data, in sections: their types, values, descriptions, groups and units.

A section is a struct with an annotation by `about` for each field, and its heading as `GROUP`.
Loading, help, shell completion and documentation are made from these rows.
"""

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import chain
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from xxhash import xxh3_64_intdigest

from router.runtime.process.redaction import HIDDEN, SECRET, redact

DECIDES = {"decides": True}
"""A mark for a setting on which decisions depend. Marks are joined by `|`."""

COMMON = {"is_common": True}
"""A mark for a setting that people change: `--help` shows it; `--help-all` shows every one."""

LIVE = {"is_live": True}
"""A mark for a setting that is read at each use: SIGHUP changes it; others need a restart."""

NO_MARK: Mapping[str, bool] = MappingProxyType({})


def about(
    text: str,
    mark: Mapping[str, bool] = NO_MARK,
    *,
    unit: str = "",
    form: str = "",
    **limits: Any,
) -> Meta:
    """Return the annotation of a setting: its description, its marks, and limits of its value.

    `unit`: of the value, in capitals, where neither the end of the name nor the type says it.
    `form`: the allowed values in words, where a pattern limits them.
    """
    return Meta(description=text, extra={**mark, "unit": unit, "form": form}, **limits)


UNITS: Mapping[str, str] = MappingProxyType(
    {
        "per_s": "PER_SECOND",
        "s": "SECONDS",
        "ms": "MS",
        "gb": "GB",
        "bytes": "BYTES",
        "tokens": "TOKENS",
        "blocks": "BLOCKS",
        "ranks": "RANKS",
        "workers": "WORKERS",
        "requests": "REQUESTS",
        "connections": "CONNECTIONS",
        "frac": "FRACTION",
        "weight": "WEIGHT",
        "port": "PORT",
        "file": "FILE",
        "dir": "FOLDER",
        "url": "URL",
        "host": "ADDRESS",
        "name": "NAME",
        "namespace": "NAME",
        "user": "USER",
        "username": "USER",
        "group": "GROUP",
        "selector": "LABELS",
        "threads": "THREADS",
        "block_size": "TOKENS",
    }
)
"""The units of values, by the end of a setting's name; the first that fits."""

OTHER_FLAGS: Mapping[str, str] = MappingProxyType({"http_port": "port"})
"""Flags of settings that have a shorter name on every command line."""


def flags_of(name: str) -> list[str]:
    """Return the flags of a setting, the one to show first."""
    names = [OTHER_FLAGS[name], name] if name in OTHER_FLAGS else [name]
    return [f"--{each.replace('_', '-')}" for each in names]


def choices_of(hint: Any) -> Iterator[str]:
    """Yield the values of an enumeration, or of a union of literals; nothing of another type."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        yield from (str(each.value) for each in hint)
    elif get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    elif get_origin(hint) is Annotated:
        yield from choices_of(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        parts = [list(choices_of(each)) for each in get_args(hint)]
        yield from [] if [] in parts else chain.from_iterable(parts)


class Setting(Struct, frozen=True):
    """A setting of a configuration, of its type with limits, and its value.

    `group`: heading under which help and documentation list it: `GROUP` of its section.
    """

    name: str
    type: Any
    value: Any
    group: str = ""

    @property
    def text(self) -> str:
        """The description, or an empty string."""
        return next((meta.description for meta in self._metas() if meta.description), "")

    @property
    def choices(self) -> list[str]:
        """The values of an enumeration; empty for other types."""
        return list(choices_of(self.type))

    @property
    def unit(self) -> str:
        """The form of a value: `a|b` for choices, else its unit or kind; empty for yes or no."""
        if isinstance(self.value, bool):
            return ""
        ends = (unit for end, unit in UNITS.items() if f"_{self.name}".endswith(f"_{end}"))
        return "|".join(self.choices) or self._fact("unit") or next(ends, "")

    @property
    def form(self) -> str:
        """The allowed values in words; empty if the type and its limits say them."""
        return self._fact("form")

    def has_mark(self, mark: Mapping[str, bool]) -> bool:
        """Return whether the setting has a mark."""
        return any(mark.items() <= (meta.extra or {}).items() for meta in self._metas())

    def redacted(self, value: Any = None) -> str:
        """Return a value of the setting for messages, by default its own; no secret is shown."""
        value = self.value if value is None else value
        return HIDDEN if value and self.has_mark(SECRET) else redact(repr(value))

    def _fact(self, key: str) -> str:
        return next((f for meta in self._metas() if (f := (meta.extra or {}).get(key))), "")

    def _metas(self) -> Iterator[Meta]:
        return (meta for meta in get_args(self.type) if isinstance(meta, Meta))


def settings_of(config: Struct) -> Iterator[Setting]:
    """Yield the settings of a configuration and of its sections, in order."""
    group = getattr(config, "GROUP", "")
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Struct):
            yield from settings_of(value)
        else:
            yield Setting(field.name, field.type, value, group)


class SettingView(Struct, frozen=True):
    """A setting's value. `source`: `default`, or the file, variable or flag that sets it.

    `warning`: why it has no effect, if it has none.
    """

    value: Any
    source: str
    warning: str | UnsetType = UNSET


NO_WARNINGS: Mapping[str, str] = MappingProxyType({})


def effective(
    config: Struct, sources: Mapping[str, str], warnings: Mapping[str, str] = NO_WARNINGS
) -> dict[str, SettingView]:
    """Return every setting by name. One without a known source is `set` if not the default.

    `warnings`: sentences about settings without effect, by name.
    """
    views = {}
    for default, each in zip(settings_of(type(config)()), settings_of(config), strict=True):
        unknown = "default" if each.value == default.value else "set"
        shown = HIDDEN if each.value and each.has_mark(SECRET) else _shown(each.value)
        source, warning = sources.get(each.name, unknown), warnings.get(each.name, UNSET)
        views[each.name] = SettingView(shown, source, warning)
    return views


def as_toml(views: Mapping[str, SettingView]) -> str:
    """Return the settings as a configuration file, with sources and warnings as comments."""
    return "".join(f"{_line(name, view.value)}  # {_note(view)}\n" for name, view in views.items())


def _note(view: SettingView) -> str:
    return view.source if view.warning is UNSET else f"{view.source}; {view.warning}"


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return redact(value) if isinstance(value, str) else value


def _line(name: str, value: Any) -> str:
    """Return a line of TOML; a value that is not set becomes a comment."""
    return f"# {name}: not set" if value is None else f"{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{_toml(key)} = {_toml(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # JSON has no infinity
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


T = TypeVar("T", bound=Struct)


def configured(config_type: type[T], **values: Any) -> T:
    """Return a configuration with some settings, by name, in their sections; others as default."""
    config = config_type()
    unknown = values.keys() - {each.name for each in settings_of(config)}
    if unknown:
        raise TypeError(f"{config_type.__name__} has no {', '.join(sorted(unknown))}")
    return with_settings(config, values)


def with_settings(config: T, values: Mapping[str, Any]) -> T:
    """Return a configuration with changed settings, by name, in whichever section they are."""
    changes = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, Struct):
            changes[name] = with_settings(value, values)
        elif name in values:
            changes[name] = values[name]
    return msgspec.structs.replace(config, **changes)


ROUTER_PREFIX = "KV_ROUTER_"
AGENT_PREFIX = "KV_ROUTER_AGENT_"
UP_PREFIX = "KV_ROUTER_UP_"
INDEXER_PREFIX = "KV_ROUTER_INDEXER_"
DOCTOR_PREFIX = "KV_ROUTER_DOCTOR_"
CLIENT_PREFIX = "KV_ROUTER_CLIENT_"
FORWARD_PREFIX = "KV_ROUTER_FORWARD_"
PREFIXES = (
    ROUTER_PREFIX,
    AGENT_PREFIX,
    UP_PREFIX,
    INDEXER_PREFIX,
    DOCTOR_PREFIX,
    CLIENT_PREFIX,
    FORWARD_PREFIX,
)


def id_of_name(name: str) -> int:
    """Return a stable id of a process, derived from its name.

    It is below 2^53, so that JSON readers keep it exact.
    """
    return xxh3_64_intdigest(name.encode()) >> 11


def describe(config_type: type[Struct]) -> list[tuple[str, object, str]]:
    """Return name, default and description of every setting."""
    return [(each.name, each.value, each.text) for each in settings_of(config_type())]
