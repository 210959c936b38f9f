"""A program of several commands, declared as rows: usage, help, version, completion, mistakes."""

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeAlias

from msgspec import Struct

from router.runtime.process.command_line import WRONG_STATUS, Parser, settings_parser
from router.runtime.process.completion import SHELLS, Completed, completion_script

Run: TypeAlias = Callable[[Sequence[str]], int]
MakeParser: TypeAlias = Callable[[Sequence[str]], Parser]
"""Returns the parser of these arguments; `--help-all` among them: its help shows all settings."""

HELP = ("help", "-h", "--help")
VERSION = ("version", "-v", "-V", "--version")
_ASKS_HELP = {"-h", "--help", "--help-all"}


class Command(Struct, frozen=True):
    """A command. `parser` imports only what help and completion need, which `run` parses by."""

    name: str
    group: str
    summary: str
    run: Run
    parser: MakeParser


def imported(place: str) -> Any:
    """Return the object at `module:name`, imported now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def run_imported(place: str) -> Run:
    """Return a command whose function, at `module:name`, is imported when it runs."""
    return lambda arguments: int(imported(place)(arguments))


def parser_of(place: str) -> MakeParser:
    """Return the maker of a parser by the function at `module:name`, which takes no arguments."""
    return lambda _: imported(place)()


def settings_parser_of(program: str, place: str, prefix: str, positional: str = "") -> MakeParser:
    """Return the maker of the parser of a process's settings, the struct at `module:name`."""

    def make(arguments: Sequence[str]) -> Parser:
        shows_all = "--help-all" in arguments
        return settings_parser(
            program, imported(place), prefix, positional=positional, shows_all=shows_all
        )

    return make


class Program(Struct, frozen=True):
    """A program: its name, what it does in a sentence, and its commands in the order of usage."""

    name: str
    summary: str
    commands: tuple[Command, ...]

    def run(self, arguments: Sequence[str]) -> int:
        """Run a command and return its exit status: 2 if there is no such command."""
        name, *rest = arguments or [""]
        if name in HELP:
            return self._help(rest)
        if name in VERSION:
            return self._version()
        if name == "completion":
            return self._completion(rest)
        command = {each.name: each for each in self.commands}.get(name)
        if command is None:
            return self._mistaken(name)
        if _ASKS_HELP & {*rest}:
            command.parser(rest).parse_args(rest)  # exits, unless it is the value of an option
        return command.run(rest)

    @property
    def usage(self) -> str:
        """The commands by group, each with a line about it."""
        lines = [
            f"usage: {self.name} COMMAND [options]",
            f"       {self.name} help COMMAND",
            "",
            self.summary,
            "",
        ]
        group = ""
        width = max(map(len, ("completion", *(each.name for each in self.commands))))
        for each in self.commands:
            if each.group != group:
                group = each.group
                lines.append(group)
            lines.append(f"  {each.name:<{width}}  {each.summary}")
        lines += [
            "about itself",
            f"  {'help':<{width}}  this, or the help of a command",
            f"  {'version':<{width}}  its version, as -v",
            f"  {'completion':<{width}}  a completion script for {', '.join(SHELLS)}",
        ]
        return "\n".join([*lines, ""])

    def _help(self, rest: Sequence[str]) -> int:
        named = [word for word in rest if word not in HELP]
        if named:
            return self.run([*named, "--help"])
        sys.stdout.write(self.usage)
        return 0

    def _version(self) -> int:
        from importlib.metadata import version  # 30 ms

        sys.stdout.write(f"{self.name} {version('kv-router')}\n")
        return 0

    def _completion(self, rest: Sequence[str]) -> int:
        parser = Parser(prog=f"{self.name} completion", description=_COMPLETION)
        parser.add_argument("shell", choices=list(SHELLS), metavar="|".join(SHELLS))
        shell = parser.parse_args(rest).shell
        commands = [
            Completed(each.name, each.summary, each.parser(["--help-all"]))
            for each in self.commands
        ]
        sys.stdout.write(completion_script(shell, self.name, commands))
        return 0

    def _mistaken(self, name: str) -> int:
        if not name:
            sys.stderr.write(self.usage)
            return WRONG_STATUS
        names = [each.name for each in self.commands]
        near = get_close_matches(name, [*names, "help", "version", "completion"], n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; all commands: {self.name} help"
        sys.stderr.write(f"{self.name}: there is no command {name!r}{hint}\n")
        return WRONG_STATUS


_COMPLETION = """\
Print a completion script: eval "$(kv-router completion bash)" in ~/.bashrc, the same with zsh in
~/.zshrc, or kv-router completion fish > ~/.config/fish/completions/kv-router.fish.
"""
