"""The configuration in effect: every setting, and where it comes from. Secrets are not shown."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from router.masking import HIDDEN, is_secret, masked


class SettingView(Struct, frozen=True):
    """One setting. `source`: `default`, or the file, variable or flag that says it."""

    value: Any
    source: str


def effective(config: Struct, sources: Mapping[str, str]) -> dict[str, SettingView]:
    """Every setting by name. Without a known source, what differs from its default was `set`."""
    views = {}
    for field in msgspec.structs.fields(type(config)):
        value = getattr(config, field.name)
        unknown = "default" if value == field.default else "set"
        shown = HIDDEN if value and is_secret(type(config), field.name) else _shown(value)
        views[field.name] = SettingView(shown, sources.get(field.name, unknown))
    return views


def as_toml(views: Mapping[str, SettingView]) -> str:
    """The same as a configuration file, with the sources as comments."""
    return "".join(f"{_line(name, view.value)}  # {view.source}\n" for name, view in views.items())


def print_and_exit(config: Struct, sources: Mapping[str, str]) -> None:
    """Answer `--show-config`. Raises SystemExit."""
    sys.stdout.write(as_toml(effective(config, sources)))
    raise SystemExit(0)


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return masked(value) if isinstance(value, str) else value


def _line(name: str, value: Any) -> str:
    """TOML spells these values as JSON does; what is not set has no spelling there."""
    return f"# {name}: not set" if value is None else f"{name} = {json.dumps(value)}"
