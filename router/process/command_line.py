"""Command lines that say what is wrong with them in a line or two, and what was probably meant."""

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from difflib import get_close_matches
from typing import NoReturn

WRONG_STATUS = 2
_UNKNOWN = "unrecognized arguments: "


class Parser(ArgumentParser):
    """One whose errors name the program, the nearest option, and how to see all of them."""

    def error(self, message: str) -> NoReturn:
        """Exits with 2."""
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
    """A setting's flag; `text`: what it is, or SUPPRESS."""
    flag = f"--{name.replace('_', '-')}"
    shown = text if text == SUPPRESS else f"{text}{_shown_default(default)}".replace("%", "%%")
    if isinstance(default, bool):
        parser.add_argument(flag, action=BooleanOptionalAction, help=shown)
    else:
        parser.add_argument(flag, metavar="VALUE", help=shown)


def _shown_default(default: object) -> str:
    """Where nothing is the default, the text says what that means."""
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return f" (default: {'yes' if default else 'no'})"
    return f" (default: {default})"
