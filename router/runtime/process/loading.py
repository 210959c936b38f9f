"""The loader of every process's configuration: flag > environment > file > default."""

import re
import sys
import tomllib
from argparse import SUPPRESS
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from router.errors import ConfigError
from router.runtime.process.aliases import Alias, Given, by_key, by_variable
from router.runtime.process.command_line import (
    Parser,
    allowed_names,
    allowed_values,
    settings_parser,
)
from router.runtime.process.redaction import SECRET, redact
from router.runtime.process.settings import (
    NO_WARNINGS,
    PREFIXES,
    ROUTER_PREFIX,
    Setting,
    as_toml,
    effective,
    flags_of,
    settings_of,
    with_settings,
)

T = TypeVar("T", bound=Struct)

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
    positional: str = "",
) -> T:
    """Load a process's configuration; see `load_with_sources`. Prints it for `--show-config`."""
    return load_with_sources(
        config_type, arguments, environment, prefix, elsewhere, positional=positional
    ).shown()


def load_with_sources(
    config_type: type[T],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    prefix: str,
    elsewhere: Mapping[str, str] = NO_OTHERS,
    aliases: Sequence[Alias] = (),
    program: str = "",
    positional: str = "",
) -> Loaded[T]:
    """Load a process's configuration. Raises ConfigError; prints help and exits on `--help`.

    `elsewhere`: settings that apply only if this process is started in another way, and that way.
    Two names of one setting in one source must have equal values. `program`: its name in the help,
    where the prefix does not say it. `positional`: a setting that may be given without its flag.
    """
    parser = settings_parser(
        program or program_of(prefix),
        config_type,
        prefix,
        elsewhere,
        aliases,
        positional,
        shows_all="--help-all" in arguments,
    )
    flags = vars(parser.parse_args(arguments))
    path = flags.pop("config", None) or environment.get(f"{prefix}CONFIG")
    is_asked_for = flags.pop("show_config", False)
    own = _from_environment(environment, prefix)
    variables = [Given(name, value, f"{prefix}{name.upper()}") for name, value in own.items()]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, given in (
        (f"file {path}", by_key(_from_file(path), aliases, str)),
        ("environment", [*variables, *by_variable(environment, aliases)]),
        ("flag", by_key(flags, aliases, partial(_flag, arguments))),
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
        value = _checked(fields, each, source, elsewhere)
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
    for name in (key, "config"):
        parser.add_argument(*flags_of(name), dest=name)
    flags = vars(parser.parse_known_args(arguments)[0])
    path = flags.get("config") or environment.get(f"{prefix}CONFIG")
    given = _from_file(path) | _from_environment(environment, prefix) | flags
    return given.get(key)


def print_and_exit(
    config: Struct, sources: Mapping[str, str], warnings: Mapping[str, str] = NO_WARNINGS
) -> None:
    """Print the settings for `--show-config`, and exit. Raises SystemExit."""
    sys.stdout.write(as_toml(effective(config, sources, warnings)))
    raise SystemExit(0)


def program_of(prefix: str) -> str:
    """Return the command whose settings have a prefix in the environment."""
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
        name: _checked(fields, Given(name, value, name), source, elsewhere)
        for name, value in values.items()
    }


def _checked(
    fields: Mapping[str, Setting], given: Given, source: str, elsewhere: Mapping[str, str]
) -> Any:
    name = given.setting
    if name in elsewhere:
        raise ConfigError(name, f"given here ({source})", f"only {elsewhere[name]}", given.name)
    if name not in fields:
        allowed = allowed_names(name, fields)
        raise ConfigError(name, f"unknown key ({source})", allowed, given.name)
    try:
        return msgspec.convert(given.value, fields[name].type, strict=False)
    except msgspec.ValidationError as error:
        allowed = allowed_values(fields[name].type, error, fields[name].form)
        reason = f"{fields[name].redacted(given.value)} ({source})"
        raise ConfigError(name, reason, allowed, given.name) from error


def as_given(
    error: ConfigError, arguments: Sequence[str], environment: Mapping[str, str], prefix: str
) -> str:
    """Return an error's sentence with the option or variable that sets what it is about.

    A setting of the file, or of none of them, keeps its own name.
    """
    names = [*typed_flags(error.key, arguments), f"{prefix}{error.key.upper()}"]
    name = next((each for each in names if each[:2] == "--" or each in environment), error.key)
    text = str(error)
    return f"{name}{text.removeprefix(error.key)}" if text.startswith(f"{error.key}:") else text


def typed_flags(name: str, arguments: Sequence[str]) -> list[str]:
    """Return the flags of a setting among some arguments."""
    typed = {each.partition("=")[0] for each in arguments}
    flags = flags_of(name)
    return [each for each in (*flags, *(f"--no-{flag[2:]}" for flag in flags)) if each in typed]


def _flag(arguments: Sequence[str], key: str) -> str:
    return next(iter(typed_flags(key, arguments)), flags_of(key)[0])
