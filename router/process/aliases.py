"""Other names of settings, such as another product's. They count as much as a setting's own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from router.errors import ConfigError


class Alias(Struct, frozen=True):
    """What a setting is called elsewhere: its `key` in files and flags, its environment `variable`.

    `meaning`: the settings that a value stands for, where it is not simply one setting's. Raises
    ConfigError.
    """

    key: str
    variable: str
    setting: str | None = None
    meaning: Callable[[str], Mapping[str, Any]] | None = None

    def settings(self, value: Any) -> Mapping[str, Any]:
        """What a value comes to."""
        if self.meaning is not None:
            return self.meaning(str(value))
        return {self.setting or self.key: value}


class Given(Struct, frozen=True):
    """One setting, as it was given, and under which name."""

    setting: str
    value: Any
    name: str


def by_key(given: Mapping[str, Any], aliases: Sequence[Alias], spelled: str) -> Iterator[Given]:
    """Settings from a file or from flags; `spelled`: how a key looks there."""
    known = {alias.key: alias for alias in aliases}
    for key, value in given.items():
        settings = known[key].settings(value) if key in known else {key: value}
        name = spelled.format(key if spelled == "{}" else key.replace("_", "-"))
        yield from (Given(setting, each, name) for setting, each in settings.items())


def by_variable(environment: Mapping[str, str], aliases: Sequence[Alias]) -> Iterator[Given]:
    """Settings from the environment, under other names than their own."""
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
    """Refuse variables of a prefix that would be passed over; `refused`: those without a
    counterpart, and why. Raises ConfigError.
    """
    known = {alias.variable for alias in aliases}
    for name in environment:
        if name.startswith(prefix) and name not in known:
            reason = refused.get(name, "no such setting")
            raise ConfigError(name, f"means nothing here: {reason}", ", ".join(sorted(known)))
