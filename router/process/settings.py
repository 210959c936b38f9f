"""One loader for the configuration of every process: flag > environment > file > default.

A setting may have other names, such as another product's; they count as much as its own.

A process's configuration is one frozen struct. Each field has a default and is `Annotated` with
its limits and a description: its documentation, its `--help` and its validation at once. Unknown
keys are errors wherever they come from.
"""

import re
import tomllib
from argparse import SUPPRESS
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct
from xxhash import xxh3_64_intdigest

from router.errors import ConfigError
from router.masking import HIDDEN, is_secret, masked
from router.process.aliases import Alias, Given, by_key, by_variable
from router.process.allowed import allowed_names, allowed_values
from router.process.command_line import Parser, add_flag
from router.process.effective import print_and_exit

T = TypeVar("T", bound=Struct)

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
"""Kubernetes sets such variables in every pod beside a service named `kv-router`."""


class Loaded(Struct, Generic[T], frozen=True):
    """A configuration, and of each setting that somebody set, where.

    `is_asked_for`: it is to be shown, and nothing else is to be done.
    """

    config: T
    sources: Mapping[str, str]
    is_asked_for: bool = False

    def shown(self) -> T:
        """The configuration; where `--show-config` asks for it, it is printed instead. Raises
        SystemExit.
        """
        if self.is_asked_for:
            print_and_exit(self.config, self.sources)
        return self.config


def load(
    config_type: type[T],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    prefix: str,
    elsewhere: Mapping[str, str] = NO_OTHERS,
) -> T:
    """The configuration of a process; see `load_with_sources`. Shows it and exits on
    `--show-config`.
    """
    return load_with_sources(config_type, arguments, environment, prefix, elsewhere).shown()


def load_with_sources(
    config_type: type[T],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    prefix: str,
    elsewhere: Mapping[str, str] = NO_OTHERS,
    aliases: Sequence[Alias] = (),
) -> Loaded[T]:
    """The configuration of a process. Raises ConfigError; prints help and exits on `--help`.

    `elsewhere`: settings that this process has when it is started otherwise, and how. Two names of
    a setting in one source have to agree.
    """
    flags = vars(_parser(config_type, prefix, elsewhere, aliases).parse_args(arguments))
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
    return Loaded(config_type(**values), sources, is_asked_for)


def _agreed(
    config_type: type[Struct], given: Iterable[Given], source: str, elsewhere: Mapping[str, str]
) -> Iterator[tuple[Given, Any]]:
    """Each setting once, checked. Raises ConfigError."""
    settings: dict[str, tuple[Given, Any]] = {}
    for each in given:
        value = checked(config_type, {each.setting: each.value}, source, elsewhere)[each.setting]
        first, before = settings.setdefault(each.setting, (each, value))
        if value != before:
            reason = masked(f"{value!r} while {first.name} is {before!r} ({source})")
            if is_secret(config_type, each.setting):
                reason = f"differs from {first.name} ({source})"
            raise ConfigError(each.name, reason, "one of the two, or both the same")
    yield from settings.values()


def first_look(
    key: str, arguments: Sequence[str], environment: Mapping[str, str], prefix: str
) -> object:
    """What is said of one setting, whatever is said of others, or None. Raises ConfigError."""
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    for flag in (key, "config"):
        parser.add_argument(f"--{flag.replace('_', '-')}")
    flags = vars(parser.parse_known_args(arguments)[0])
    path = flags.get("config") or environment.get(f"{prefix}CONFIG")
    given = _from_file(path) | _from_environment(environment, prefix) | flags
    return given.get(key)


def id_of_name(name: str) -> int:
    """A stable id for a process, made from its name; below 2^53, so that JSON readers keep it
    whole.
    """
    return xxh3_64_intdigest(name.encode()) >> 11


def describe(config_type: type[Struct]) -> list[tuple[str, object, str]]:
    """Name, default and description of every field."""
    hints = get_type_hints(config_type, include_extras=True)
    return [
        (field.name, field.default, _text(hints[field.name]))
        for field in msgspec.structs.fields(config_type)
    ]


def _parser(
    config_type: type[Struct], prefix: str, elsewhere: Mapping[str, str], aliases: Sequence[Alias]
) -> Parser:
    program = _program(prefix)
    parser = Parser(prog=program, usage=f"{program} [options]", argument_default=SUPPRESS)
    if prefix in PREFIXES:
        parser.epilog = f"Each can also be set in the environment, as {prefix}CONFIG and so on."
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
    """Variables of other commands, whose prefixes begin with the router's, are none of ours."""
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
    """Values from a source, of the types and within the limits of their fields. Raises
    ConfigError.
    """
    fields = {field.name: field for field in msgspec.structs.fields(config_type)}
    converted = {}
    for name, value in values.items():
        if name in elsewhere:
            raise ConfigError(name, f"given here ({source})", f"only {elsewhere[name]}")
        if name not in fields:
            raise ConfigError(name, f"unknown key ({source})", allowed_names(name, fields))
        try:
            converted[name] = msgspec.convert(value, fields[name].type, strict=False)
        except msgspec.ValidationError as error:
            said = HIDDEN if is_secret(config_type, name) else masked(repr(value))
            allowed = allowed_values(fields[name].type, error)
            raise ConfigError(name, f"{said} ({source})", allowed) from error
    return converted


def _text(hint: Any) -> str:
    texts = [meta.description for meta in get_args(hint) if isinstance(meta, Meta)]
    return next((text for text in texts if text), "")
