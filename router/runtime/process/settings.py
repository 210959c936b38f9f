"""The loader of every process's configuration: flag > environment > file > default."""

import json
import re
import sys
import tomllib
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
)

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from xxhash import xxh3_64_intdigest

from router.errors import ConfigError
from router.runtime.process.aliases import Alias, Given, by_key, by_variable
from router.runtime.process.redaction import HIDDEN, SECRET, redact

_AT_MOST = 40
"""The limit of names listed in one message; beyond it the message refers to `--help`."""


def allowed_names(name: str, names: Collection[str]) -> str:
    """Return the names similar to an unknown one, or all names."""
    near = get_close_matches(name, names, n=3)
    if near:
        return " or ".join(near)
    return ", ".join(sorted(names)) if len(names) <= _AT_MOST else "what --help lists"


def allowed_values(hint: Any, error: msgspec.ValidationError) -> str:
    """Return the allowed values of a type: all of an enumeration, otherwise the expected type."""
    return ", ".join(_choices(hint)) or str(error).removeprefix("Expected ").partition(", got")[0]


def _choices(hint: Any) -> Iterator[str]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        yield from (str(each.value) for each in hint)
    elif get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    elif get_origin(hint) is Annotated:
        yield from _choices(get_args(hint)[0])


WRONG_STATUS = 2
_UNKNOWN = "unrecognized arguments: "


class Parser(ArgumentParser):
    """A parser with errors that name the program, the nearest option and `--help`."""

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with status 2."""
        hint = self._hint(message) if message.startswith(_UNKNOWN) else ""
        self.exit(WRONG_STATUS, f"{self.prog}: {message}{hint}; all options: {self.prog} --help\n")

    def _hint(self, message: str) -> str:
        given = message.removeprefix(_UNKNOWN).split()[0].split("=")[0]
        known = [
            option
            for action in self._actions
            if action.help != SUPPRESS
            for option in action.option_strings
        ]
        near = get_close_matches(given, known, n=1)
        return f" (did you mean {near[0]}?)" if near else ""


def add_flag(parser: ArgumentParser, name: str, default: object, text: str) -> None:
    """Add a setting's flag; `text`: its help, or SUPPRESS."""
    flag = f"--{name.replace('_', '-')}"
    shown = text if text == SUPPRESS else f"{text}{_shown_default(default)}".replace("%", "%%")
    if isinstance(default, bool):
        parser.add_argument(flag, action=BooleanOptionalAction, help=shown)
    else:
        parser.add_argument(flag, metavar="VALUE", help=shown)


def _shown_default(default: object) -> str:
    """Return the note on a default; empty without one, because the help text explains that case."""
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return f" (default: {'yes' if default else 'no'})"
    return f" (default: {default})"


DECIDES = {"decides": True}
"""A mark for a setting on which decisions depend: `Meta(extra=DECIDES)`."""


def about(text: str, mark: dict[str, bool] | None = None, **limits: Any) -> Meta:
    """Return the annotation of a setting: its description, a mark, and limits of its value."""
    return Meta(description=text, extra=mark, **limits)


class Setting(Struct, frozen=True):
    """A setting of a configuration, of its type with limits, and its value."""

    name: str
    type: Any
    value: Any

    @property
    def text(self) -> str:
        """The description, or an empty string."""
        return next((meta.description for meta in self._metas() if meta.description), "")

    def has_mark(self, mark: Mapping[str, bool]) -> bool:
        """Return whether the setting has a mark: `Meta(extra=mark)`."""
        return any(meta.extra == mark for meta in self._metas())

    def redacted(self, value: Any = None) -> str:
        """Return a value of the setting for messages, by default its own; no secret is shown."""
        value = self.value if value is None else value
        return HIDDEN if value and self.has_mark(SECRET) else redact(repr(value))

    def _metas(self) -> Iterator[Meta]:
        return (meta for meta in get_args(self.type) if isinstance(meta, Meta))


def settings_of(config: Struct) -> Iterator[Setting]:
    """Yield the settings of a configuration and of its sections, in order."""
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Struct):
            yield from settings_of(value)
        else:
            yield Setting(field.name, field.type, value)


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


def print_and_exit(
    config: Struct, sources: Mapping[str, str], warnings: Mapping[str, str] = NO_WARNINGS
) -> None:
    """Print the settings for `--show-config`, and exit. Raises SystemExit."""
    sys.stdout.write(as_toml(effective(config, sources, warnings)))
    raise SystemExit(0)


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

NO_OTHERS: Mapping[str, str] = MappingProxyType({})

_KUBERNETES_SERVICE_LINK = re.compile(
    r"KV_ROUTER_(AGENT_|INDEXER_|FORWARD_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)\w*)?)"
)
"""Variables that Kubernetes sets in every pod beside a service named `kv-router`."""


class Loaded(Struct, Generic[T], frozen=True):
    """A configuration, and the source of each setting that was set.

    `is_asked_for`: the configuration is to be printed, and the process not to be run. `warnings`:
    sentences about settings without effect, by name, to be printed with it.
    """

    config: T
    sources: Mapping[str, str]
    is_asked_for: bool = False
    warnings: Mapping[str, str] = NO_WARNINGS

    def shown(self) -> T:
        """Return the configuration, or print it and exit for `--show-config`. Raises SystemExit."""
        if self.is_asked_for:
            print_and_exit(self.config, self.sources, self.warnings)
        return self.config


def load(
    config_type: type[T],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    prefix: str,
    elsewhere: Mapping[str, str] = NO_OTHERS,
) -> T:
    """Load a process's configuration; see `load_with_sources`. Prints it for `--show-config`."""
    return load_with_sources(config_type, arguments, environment, prefix, elsewhere).shown()


def load_with_sources(
    config_type: type[T],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    prefix: str,
    elsewhere: Mapping[str, str] = NO_OTHERS,
    aliases: Sequence[Alias] = (),
    program: str = "",
) -> Loaded[T]:
    """Load a process's configuration. Raises ConfigError; prints help and exits on `--help`.

    `elsewhere`: settings that apply only if this process is started in another way, and that way.
    Two names of one setting in one source must have equal values. `program`: its name in the help,
    where the prefix does not say it.
    """
    program = program or _program(prefix)
    flags = vars(_parser(program, config_type, prefix, elsewhere, aliases).parse_args(arguments))
    path = flags.pop("config", None) or environment.get(f"{prefix}CONFIG")
    is_asked_for = flags.pop("show_config", False)
    own = _from_environment(environment, prefix)
    variables = [Given(name, value, f"{prefix}{name.upper()}") for name, value in own.items()]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, given in (
        (f"file {path}", by_key(_from_file(path), aliases, "{}")),
        ("environment", [*variables, *by_variable(environment, aliases)]),
        ("flag", by_key(flags, aliases, "--{}")),
    ):
        for each, value in _agreed(config_type, given, source, elsewhere):
            values[each.setting] = value
            sources[each.setting] = f"{source}: {each.name}"
    return Loaded(with_settings(config_type(), values), sources, is_asked_for)


def _agreed(
    config_type: type[Struct], given: Iterable[Given], source: str, elsewhere: Mapping[str, str]
) -> Iterator[tuple[Given, Any]]:
    """Yield each setting once, checked. Raises ConfigError."""
    settings: dict[str, tuple[Given, Any]] = {}
    fields = {field.name: field for field in settings_of(config_type())}
    for each in given:
        value = _checked(fields, each.setting, each.value, source, elsewhere)
        first, before = settings.setdefault(each.setting, (each, value))
        if value != before:
            reason = redact(f"{value!r} while {first.name} is {before!r} ({source})")
            if fields[each.setting].has_mark(SECRET):
                reason = f"differs from {first.name} ({source})"
            raise ConfigError(each.name, reason, "one of the two, or both the same")
    yield from settings.values()


def first_pass(
    key: str, arguments: Sequence[str], environment: Mapping[str, str], prefix: str
) -> object:
    """Return one setting's value, or None, without validating the others. Raises ConfigError."""
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    for flag in (key, "config"):
        parser.add_argument(f"--{flag.replace('_', '-')}")
    flags = vars(parser.parse_known_args(arguments)[0])
    path = flags.get("config") or environment.get(f"{prefix}CONFIG")
    given = _from_file(path) | _from_environment(environment, prefix) | flags
    return given.get(key)


def id_of_name(name: str) -> int:
    """Return a stable id of a process, derived from its name.

    It is below 2^53, so that JSON readers keep it exact.
    """
    return xxh3_64_intdigest(name.encode()) >> 11


def describe(config_type: type[Struct]) -> list[tuple[str, object, str]]:
    """Return name, default and description of every setting."""
    return [(each.name, each.value, each.text) for each in settings_of(config_type())]


def _parser(
    program: str,
    config_type: type[Struct],
    prefix: str,
    elsewhere: Mapping[str, str],
    aliases: Sequence[Alias],
) -> Parser:
    parser = Parser(prog=program, usage=f"{program} [options]", argument_default=SUPPRESS)
    if prefix in PREFIXES:
        parser.epilog = f"Each can also be set in the environment, such as {prefix}CONFIG."
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same keys")
    shown = "print every setting and where it comes from, and exit"
    parser.add_argument("--show-config", action="store_true", help=shown)
    defaults = {}
    for name, default, text in describe(config_type):
        defaults[name] = default
        add_flag(parser, name, default, text)
    for name in elsewhere:
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="?", help=SUPPRESS)
    for alias in aliases:
        if alias.key not in defaults:
            default = None if alias.setting is None else defaults[alias.setting]
            add_flag(parser, alias.key, default, SUPPRESS)
    return parser


def _program(prefix: str) -> str:
    name = prefix.removeprefix(ROUTER_PREFIX).rstrip("_").lower()
    return {"": "kv-router serve", "agent": "kv-worker-agent run"}.get(name, f"kv-router {name}")


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError("config", f"{path}: {reason}", "a readable TOML file") from error


def _from_environment(environment: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return settings of the environment, without those of other commands with longer prefixes."""
    others = set(PREFIXES) - {prefix}
    foreign = tuple(other for other in others if other.startswith(prefix))
    values = {
        key.removeprefix(prefix).lower(): value
        for key, value in environment.items()
        if key.startswith(prefix)
        and not key.startswith(foreign)
        and not _KUBERNETES_SERVICE_LINK.fullmatch(key)
    }
    values.pop("config", None)
    return values


def checked(
    config_type: type[Struct],
    values: Mapping[str, Any],
    source: str,
    elsewhere: Mapping[str, str] = NO_OTHERS,
) -> dict[str, Any]:
    """Return values of a source, converted and checked by their fields. Raises ConfigError."""
    fields = {field.name: field for field in settings_of(config_type())}
    return {
        name: _checked(fields, name, value, source, elsewhere) for name, value in values.items()
    }


def _checked(
    fields: Mapping[str, Setting], name: str, value: Any, source: str, elsewhere: Mapping[str, str]
) -> Any:
    if name in elsewhere:
        raise ConfigError(name, f"given here ({source})", f"only {elsewhere[name]}")
    if name not in fields:
        raise ConfigError(name, f"unknown key ({source})", allowed_names(name, fields))
    try:
        return msgspec.convert(value, fields[name].type, strict=False)
    except msgspec.ValidationError as error:
        allowed = allowed_values(fields[name].type, error)
        reason = f"{fields[name].redacted(value)} ({source})"
        raise ConfigError(name, reason, allowed) from error
