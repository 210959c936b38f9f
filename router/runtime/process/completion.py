"""Completion scripts for bash, zsh and fish, made from the parsers of a program's commands."""

import re
from argparse import SUPPRESS, Action, BooleanOptionalAction
from collections.abc import Callable, Iterator, Mapping, Sequence
from shlex import quote
from types import MappingProxyType

from msgspec import Struct

from router.runtime.process.command_line import Parser

_PATHS = ("FILE", "FOLDER", "PATH", "TRACE")
_WORD = re.compile(r"[\w.=-]+")


class Completed(Struct, frozen=True):
    """A command with its summary and its parser, of which subcommands are options as well."""

    name: str
    summary: str
    parser: Parser


class Option(Struct, frozen=True):
    """An option: its flags, a line about it, its choices, and whether a value follows, or a path.

    `metavar`: the value's name. The long forms of a switch, yes and no, are options of their own.
    """

    flag: str
    text: str
    choices: tuple[str, ...] = ()
    metavar: str = ""

    @property
    def is_path(self) -> bool:
        """True if its value is a file or folder."""
        return self.metavar in _PATHS


def completion_script(shell: str, program: str, commands: Sequence[Completed]) -> str:
    """Return the script of a shell, one of SHELLS."""
    return "\n".join([*SHELLS[shell](program, commands), ""])


def options_of(parser: Parser) -> Iterator[Option]:
    """Yield the options of a command, and of its subcommands, each flag once."""
    seen = set()
    for part in (parser, *parser.subcommands.values()):
        for action in part.options:
            for flag in action.option_strings:
                if flag not in seen and flag.startswith("--"):
                    seen.add(flag)
                    yield Option(flag, _brief(action), _choices(action), _metavar(action))


def _brief(action: Action) -> str:
    text = "" if action.help in (None, SUPPRESS) else str(action.help)
    return re.split(r"; |: | \(", text.replace("%%", "%"))[0].strip()


def _metavar(action: Action) -> str:
    if action.nargs == 0 or isinstance(action, BooleanOptionalAction):
        return ""
    return str(action.metavar or action.dest.upper())


def _choices(action: Action) -> tuple[str, ...]:
    words = [str(each) for each in action.choices or ()] or _metavar(action).split("|")
    return tuple(words) if len(words) > 1 and all(map(_WORD.fullmatch, words)) else ()


def _words_of(command: Completed) -> list[str]:
    return [*command.parser.subcommands, *(each.flag for each in options_of(command.parser))]


def _bash(program: str, commands: Sequence[Completed]) -> Iterator[str]:
    function = f"_{program.replace('-', '_')}"
    names = " ".join([*(each.name for each in commands), "help", "version", "completion"])
    yield f"# bash completion of {program}"
    yield f"{function}() {{"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield '  if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f'    COMPREPLY=($(compgen -W "{names}" -- "$word")); return'
    yield "  fi"
    yield '  case "${COMP_WORDS[1]} $before" in'
    for command in commands:
        for each in options_of(command.parser):
            if each.choices:
                yield f'    "{command.name} {each.flag}") words="{" ".join(each.choices)}" ;;'
            elif each.metavar:
                yield f'    "{command.name} {each.flag}") COMPREPLY=(); return ;;'
    yield "  esac"
    yield '  [ -n "$words" ] || case "${COMP_WORDS[1]}" in'
    for command in commands:
        yield f'    {command.name}) words="{" ".join(_words_of(command))}" ;;'
    yield f'    help) words="{names}" ;;'
    yield f'    completion) words="{" ".join(SHELLS)}" ;;'
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    yield f"complete -o default -F {function} {program}"


def _zsh(program: str, commands: Sequence[Completed]) -> Iterator[str]:
    function = f"_{program.replace('-', '_')}"
    yield f"#compdef {program}"
    yield f"{function}() {{"
    yield "  local -a commands=("
    for each in commands:
        yield f"    {quote(f'{each.name}:{each.summary}')}"
    yield "    'help:the help of a command' version 'completion:a completion script'"
    yield "  )"
    yield "  if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "  case $words[2] in"
    for command in commands:
        yield f"    {command.name}) _arguments -S \\"
        for option in options_of(command.parser):
            yield f"      {quote(_zsh_option(option))} \\"
        if command.parser.subcommands:
            questions = " ".join(command.parser.subcommands)
            yield f"      {quote(f'2:question:({questions})')} \\"
        yield "      '*:file:_files' ;;"
    yield "    help) _describe command commands ;;"
    yield f"    completion) _values shell {' '.join(SHELLS)} ;;"
    yield "  esac"
    yield "}"
    yield f"compdef {function} {program}"


def _zsh_option(each: Option) -> str:
    text = re.sub(r"[][:\\]", "", each.text)
    if not each.metavar:
        return f"{each.flag}[{text}]"
    values = f"({' '.join(each.choices)})" if each.choices else "_files" if each.is_path else " "
    name = re.sub(r"[^A-Z_]", "", each.metavar) or "value"
    return f"{each.flag}=[{text}]:{name.lower()}:{values}"


def _fish(program: str, commands: Sequence[Completed]) -> Iterator[str]:
    first = f"complete -c {program} -n __fish_use_subcommand -f"
    yield f"# fish completion of {program}"
    for command in commands:
        yield f"{first} -a {command.name} -d {quote(command.summary)}"
    yield f"{first} -a 'help version completion'"
    for command in commands:
        here = f"complete -c {program} -n '__fish_seen_subcommand_from {command.name}'"
        if command.parser.subcommands:
            yield f"{here} -f -a {quote(' '.join(command.parser.subcommands))}"
        for each in options_of(command.parser):
            value = " -r" if each.metavar else ""
            value += f" -f -a {quote(' '.join(each.choices))}" if each.choices else ""
            value += "" if each.is_path or each.choices or not each.metavar else " -f"
            yield f"{here} -l {each.flag.removeprefix('--')} -d {quote(each.text)}{value}"


SHELLS: Mapping[str, Callable[[str, Sequence[Completed]], Iterator[str]]] = MappingProxyType(
    {"bash": _bash, "zsh": _zsh, "fish": _fish}
)
"""The shells, by name, and what makes the lines of their scripts."""
