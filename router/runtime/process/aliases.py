"""Alternative names of settings, such as another product's, equivalent to a setting's own name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from router.errors import ConfigError


class Alias(Struct, frozen=True):
    """An alternative name of a setting: its `key` in files and flags, its environment `variable`.

    `meaning`: returns the settings that a value stands for, if it is not one setting's value. It
    raises ConfigError.
    """

    key: str
    variable: str
    setting: str | None = None
    meaning: Callable[[str], Mapping[str, Any]] | None = None

    def settings(self, value: Any) -> Mapping[str, Any]:
        """Return the settings that a value stands for."""
        if self.meaning is not None:
            return self.meaning(str(value))
        return {self.setting or self.key: value}


class Given(Struct, frozen=True):
    """A given setting, its value, and the name it was given under."""

    setting: str
    value: Any
    name: str


def by_key(
    given: Mapping[str, Any], aliases: Sequence[Alias], spelled: Callable[[str], str]
) -> Iterator[Given]:
    """Yield settings of a file or of flags. `spelled`: returns a key as messages name it."""
    known = {alias.key: alias for alias in aliases}
    for key, value in given.items():
        settings = known[key].settings(value) if key in known else {key: value}
        yield from (Given(setting, each, spelled(key)) for setting, each in settings.items())


def by_variable(environment: Mapping[str, str], aliases: Sequence[Alias]) -> Iterator[Given]:
    """Yield settings of the environment that were given under alternative names."""
    for alias in aliases:
        if alias.variable in environment:
            settings = alias.settings(environment[alias.variable])
            yield from (Given(name, value, alias.variable) for name, value in settings.items())


def check_variables(
    environment: Mapping[str, str],
    prefix: str,
    aliases: Sequence[Alias],
    refused: Mapping[str, str],
) -> None:
    """Raise ConfigError for a variable with the prefix that would be ignored.

    `refused`: variables without a counterpart, each with the reason.
    """
    known = {alias.variable for alias in aliases}
    for name in environment:
        if name.startswith(prefix) and name not in known:
            reason = refused.get(name, "no such setting")
            raise ConfigError(name, f"not supported here: {reason}", ", ".join(sorted(known)))
