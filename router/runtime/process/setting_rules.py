"""Rules between settings: contradictions are refused at start, with both settings named."""

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from msgspec import Struct

from router.errors import ConfigError
from router.runtime.process.settings import settings_of


class ConflictRule(Struct, frozen=True):
    """A conflict: `key` contradicts `other` if `is_broken`, for the reason `why`.

    `is_broken` receives the settings of all sections as attributes.
    """

    key: str
    other: str
    is_broken: Callable[[Any], bool]
    why: str


def check_rules(rules: Iterable[ConflictRule], config: Struct, sources: Mapping[str, str]) -> None:
    """Refuse settings that contradict each other. Raises ConfigError.

    Only a setting that was set can break a rule: a default gives way.
    """
    settings = {each.name: each for each in settings_of(config)}
    values = SimpleNamespace(**{each.name: each.value for each in settings.values()})
    for rule in rules:
        if rule.key in sources and rule.is_broken(values):
            value, other = (settings[key].redacted() for key in (rule.key, rule.other))
            where = f" ({sources[rule.other]})" if rule.other in sources else " by default"
            reason = f"{value} ({sources[rule.key]}) while {rule.other} is {other}{where}"
            raise ConfigError(rule.key, f"{reason}: {rule.why}", "one of the two, changed")
