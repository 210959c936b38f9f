"""Settings that contradict each other, refused at start with both named."""

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from msgspec import Struct

from router.errors import ConfigError
from router.masking import HIDDEN, is_secret, masked

T = TypeVar("T", bound=Struct)


class Rule(Struct, Generic[T], frozen=True):
    """`key` may not be what it is while `other` is what it is: see `why`."""

    key: str
    other: str
    is_broken: Callable[[T], bool]
    why: str


def check_rules(rules: Iterable[Rule[T]], config: T, sources: Mapping[str, str]) -> None:
    """Refuse contradictions among what somebody set. Raises ConfigError.

    A default contradicts nobody: it gives way.
    """
    for rule in rules:
        if rule.key in sources and rule.is_broken(config):
            value, other = (_shown(config, key) for key in (rule.key, rule.other))
            where = f" ({sources[rule.other]})" if rule.other in sources else " by default"
            reason = f"{value} ({sources[rule.key]}) while {rule.other} is {other}{where}"
            raise ConfigError(rule.key, f"{reason}: {rule.why}", "one of the two, changed")


def _shown(config: Struct, key: str) -> str:
    value = getattr(config, key)
    return HIDDEN if value and is_secret(type(config), key) else masked(repr(value))
