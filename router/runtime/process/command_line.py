"""Command lines: one parser for all commands, whose help and errors are made for people.

`--help` shows the settings that are marked COMMON, by group, and `--help-all` all of them. Shell
completion (`completion.py`) and the tables of the documentation are made from the same parsers.
"""

import math
import os
import re
from argparse import (
    ONE_OR_MORE,
    OPTIONAL,
    SUPPRESS,
    ZERO_OR_MORE,
    Action,
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    HelpFormatter,
    _SubParsersAction,
)
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol

import msgspec
from msgspec import Struct

from router.runtime.process.aliases import Alias
from router.runtime.process.settings import (
    CLIENT_PREFIX,
    COMMON,
    PREFIXES,
    Setting,
    choices_of,
    flags_of,
    settings_of,
)

_AT_MOST = 40
"""The limit of names listed in one message; beyond it the message refers to `--help-all`."""

_ARTICLES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}

WRONG_STATUS = 2
_UNKNOWN = "unrecognized arguments: "
_CHOICE = re.compile(r"argument (?P<what>\S+): invalid choice: '(?P<given>.*?)' \(choose from .*\)")


def allowed_names(name: str, names: Collection[str]) -> str:
    """Return the names similar to an unknown one, or all names."""
    near = get_close_matches(name, names, n=3)
    if near:
        return " or ".join(near)
    return ", ".join(sorted(names)) if len(names) <= _AT_MOST else "what --help-all lists"


def allowed_values(hint: Any, error: msgspec.ValidationError, form: str = "") -> str:
    """Return the allowed values of a type in words.

    All of an enumeration; else `form`, if the setting has one; else the type with the limit that
    the value breaks.
    """
    expected = str(error).removeprefix("Expected ").partition(", got")[0]
    for name, words in _ARTICLES.items():
        expected = expected.replace(f"`{name}`", words).replace(f"`{name} | null`", words)
    return ", ".join(choices_of(hint)) or form or expected.partition(" matching regex")[0]


class _Formatter(HelpFormatter):
    """Help with room for long options; a switch is shown as `--[no-]name`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: Action) -> str:
        if isinstance(action, BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        if action.option_strings and action.nargs != 0:
            shown = [each for each in action.option_strings if each.startswith("--")][:1]
            return f"{(shown or action.option_strings)[0]} {self._metavar(action)}"
        return super()._format_action_invocation(action)

    def _metavar(self, action: Action) -> str:
        return self._format_args(action, (action.dest or "").upper())


class Parser(ArgumentParser):
    """A parser with errors of one line, which name the program and the nearest option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **options})

    def format_usage(self) -> str:
        """Return the usage in one line: options, and the positional arguments by name."""
        return f"usage: {self._usage_line()}\n"

    def format_help(self) -> str:
        """Return the help, below a usage that does not repeat every option."""
        self.usage = self._usage_line().replace("%", "%%")
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print an error in one line, and exit with status 2."""
        self.exit(WRONG_STATUS, f"{self.prog}: {self._in_words(message)}\n")

    @property
    def options(self) -> list[Action]:
        """The options and positional arguments that help may show, in order."""
        return [each for each in self._actions if not getattr(each, "is_alias", False)]

    @property
    def subcommands(self) -> Mapping[str, "Parser"]:
        """The parsers of subcommands, by name."""
        found = [each for each in self._actions if isinstance(each, _SubParsersAction)]
        return {name: parser for each in found for name, parser in each.choices.items()}

    def _usage_line(self) -> str:
        words = [self.prog, "[options]"]
        for action in self._actions:
            if not action.option_strings and action.help != SUPPRESS:
                word = str(action.metavar or action.dest.upper())
                word = f"{word}…" if action.nargs in (ONE_OR_MORE, ZERO_OR_MORE) else word
                words.append(f"[{word}]" if action.nargs in (OPTIONAL, ZERO_OR_MORE) else word)
        return " ".join(words)

    def _in_words(self, message: str) -> str:
        choice = _CHOICE.fullmatch(message)
        if choice is not None:
            allowed = allowed_names(choice["given"], self.subcommands or [])
            return f"{choice['what']}: {choice['given']!r} is unknown (allowed: {allowed})"
        hint = self._hint(message) if message.startswith(_UNKNOWN) else ""
        has_more = any("--help-all" in each.option_strings for each in self._actions)
        return f"{message}{hint}; all options: {self.prog} --help{'-all' if has_more else ''}"

    def _hint(self, message: str) -> str:
        given = message.removeprefix(_UNKNOWN).split()[0].split("=")[0]
        known = [option for action in self.options for option in action.option_strings]
        near = get_close_matches(given, known, n=1)
        return f" (did you mean {near[0]}?)" if near else ""


class _Group(Protocol):
    """A parser, or a group of its options."""

    def add_argument(self, *names: str, **options: Any) -> Action: ...


def add_setting(parser: _Group, setting: Setting, text: str) -> None:
    """Add a setting's flags. `text`: its help, or SUPPRESS."""
    options: dict[str, Any] = {
        "dest": setting.name,
        "default": SUPPRESS,
        "help": text if text == SUPPRESS else text.replace("%", "%%"),
    }
    if isinstance(setting.value, bool):
        options["action"] = BooleanOptionalAction
    else:
        options["metavar"] = setting.unit or "VALUE"
    parser.add_argument(*flags_of(setting.name), **options)


def described(setting: Setting) -> str:
    """Return the description of a setting and its default."""
    return f"{setting.text}{_shown_default(setting.value)}"


def _first_part(setting: Setting) -> str:
    """Return its description up to the first semicolon, unless that explains its choices."""
    if setting.choices:
        return described(setting)
    return f"{setting.text.partition(';')[0]}{_shown_default(setting.value)}"


def _shown_default(default: object) -> str:
    """Return the note on a default; empty without one, because the help text explains that case."""
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return f" (default: {'yes' if default else 'no'})"
    shown = f"{default:g}" if isinstance(default, float) and abs(default) < 1e6 else default
    return f" (default: {shown})"


def settings_parser(
    program: str,
    config_type: type[Struct],
    prefix: str,
    elsewhere: Iterable[str] = (),
    aliases: Sequence[Alias] = (),
    positional: str = "",
    *,
    shows_all: bool = False,
) -> Parser:
    """Return the parser of a process's settings.

    `elsewhere`: settings that are accepted, to be refused in words. `positional`: the setting that
    may be given without its flag. `shows_all`: help shows all settings in full, not the
    common ones in brief.
    """
    settings = {each.name: each for each in settings_of(config_type())}
    common = {each.name for each in settings.values() if each.has_mark(COMMON)}
    parser = Parser(prog=program, argument_default=SUPPRESS, add_help=False)
    _add_general(parser, len(settings) if common else 0)
    if positional:
        place = {"nargs": OPTIONAL, "metavar": positional.upper(), "default": SUPPRESS}
        parser.add_argument(positional, help=settings[positional].text.replace("%", "%%"), **place)  # type: ignore[arg-type]
    shown = set(settings) if shows_all or not common else common
    text = _first_part if shown is common else described
    for group, rows in _grouped(settings.values(), shown):
        for each in rows:
            help_text = text(each) if each.name in shown else SUPPRESS
            add_setting(group_of(parser, group), each, help_text)
    if prefix in PREFIXES:
        parser.epilog = (
            f"Each is also a key of the TOML file, and a variable of the environment: "
            f"{prefix}CONFIG, …"
        )
    for name in elsewhere:
        hidden = parser.add_argument(f"--{name.replace('_', '-')}", nargs="?", help=SUPPRESS)
        hidden.is_alias = True  # type: ignore[attr-defined]
    for alias in aliases:
        if alias.key not in settings:
            _add_alias(parser, alias, settings)
    return parser


def group_of(parser: ArgumentParser, title: str) -> _Group:
    """Return the group of options under a heading, or the parser itself without one."""
    if not title:
        return parser
    known = {each.title: each for each in parser._action_groups}
    return known.get(title) or parser.add_argument_group(title)


def _add_general(parser: Parser, count: int) -> None:
    """Add help, file and `--show-config`; `count`: of settings, if `--help` shows only some."""
    text = "show the settings that people change, and exit" if count else "show this, and exit"
    parser.add_argument("-h", "--help", action="help", help=text)
    if count:
        parser.add_argument(
            "--help-all", action="help", help=f"show all {count} settings, and exit"
        )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same keys")
    shown = "print all settings with their sources, and exit"
    parser.add_argument("--show-config", action="store_true", help=shown)


def _grouped(
    settings: Iterable[Setting], shown: Collection[str]
) -> Iterator[tuple[str, list[Setting]]]:
    """Yield the settings by group: groups in order of their first shown setting."""
    groups: dict[str, list[Setting]] = {}
    for each in sorted(settings, key=lambda each: each.name not in shown):
        groups.setdefault(each.group, []).append(each)
    yield from groups.items()


def _add_alias(parser: Parser, alias: Alias, settings: Mapping[str, Setting]) -> None:
    """Add another product's name of a setting, which help does not show."""
    is_switch = alias.setting is not None and isinstance(settings[alias.setting].value, bool)
    action = {"action": BooleanOptionalAction} if is_switch else {}
    flag = f"--{alias.key.replace('_', '-')}"
    hidden = parser.add_argument(flag, help=SUPPRESS, default=SUPPRESS, **action)  # type: ignore[arg-type]
    hidden.is_alias = True  # type: ignore[attr-defined]


_ACCESS = {
    "token_file": "file with a bearer token of scope admin",
    "ca_file": "PEM file of certificate authorities for the {}; by default the system's",
    "cert_file": "PEM certificate, if the {} requires one",
    "key_file": "PEM file of the certificate's private key",
}
"""The files of a client's credentials; `{}`: the kind of server."""


def add_access(parser: Parser, server: str) -> None:
    """Add the options of the credentials for a server, a word for it."""
    for name, what in _ACCESS.items():
        variable = f"{CLIENT_PREFIX}{name.upper()}"
        default, text = os.environ.get(variable, ""), f"{what.format(server)} (or {variable})"
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=default, metavar="FILE", help=text)


def number_within(least: float, most: float, unit: str = "") -> Callable[[str], float]:
    """Return the type of an argument that is a number of this range. `unit`: in the plural."""

    def parsed(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            allowed = f"{least:g} to {most:g} {unit}".rstrip()
            raise ArgumentTypeError(f"{text!r} (allowed: {allowed})")
        return number

    return parsed


def as_url(text: str) -> str:
    """Return a URL; one without a scheme is of http."""
    return text if "://" in text else f"http://{text}"
