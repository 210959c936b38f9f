"""Policies to compare, as arguments of the form `NAME:key=value,key=value`."""

from collections.abc import Mapping
from random import Random
from typing import TypeVar

from msgspec import Struct, ValidationError, convert

from router.config.core import make_core
from router.config.router import DECISION_SETTINGS, RouterConfig
from router.core.core import RouterCore
from router.errors import ConfigError
from router.observability.recording import decision_settings
from router.recording.format import Setting
from router.runtime.process.loading import checked
from router.tools.recordings.cores import config_of

T = TypeVar("T")


class Spec(Struct, frozen=True):
    """A name and its options; `text` is the original argument."""

    text: str
    name: str
    values: Mapping[str, str]

    def converted(self, flag: str, kind: type[T]) -> T:
        """Return the options as a struct. Raises ConfigError."""
        try:
            return convert(dict(self.values), kind, strict=False)
        except ValidationError as error:
            allowed = ", ".join(kind.__struct_fields__)  # type: ignore[attr-defined]
            raise ConfigError(flag, f"{self.text!r}: {error}", allowed) from error


def parsed_spec(flag: str, text: str) -> Spec:
    """Return the parts of a specification. Raises ConfigError."""
    name, _, rest = text.partition(":")
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals and value):
            raise ConfigError(flag, f"{part!r} in {text!r}", "NAME:key=value,key=value")
        if key in values:
            raise ConfigError(flag, f"{key} twice in {text!r}", "each key once")
        values[key] = value
    return Spec(text, name, values)


def parsed_specs(flag: str, text: str) -> list[Spec]:
    """Return specifications with spaces between, at least one. Raises ConfigError."""
    specs = [parsed_spec(flag, word) for word in text.split()]
    if not specs:
        raise ConfigError(flag, "empty", "one or more, with spaces between")
    return specs


def parsed_numbers(flag: str, text: str, kind: type[T]) -> list[T]:
    """Return constrained numbers with spaces between, at least one. Raises ConfigError."""
    try:
        numbers = [convert(word, kind, strict=False) for word in text.split()]
    except ValidationError as error:
        raise ConfigError(flag, repr(text), str(error)) from error
    if not numbers:
        raise ConfigError(flag, "empty", "one or more numbers, with spaces between")
    return numbers


RECORDED = "recorded"
"""The name for the unchanged settings of a recording."""


class NamedPolicy(Struct, frozen=True):
    """Settings, and their name in reports."""

    name: str
    settings: Mapping[str, Setting]

    def make_core(self, rng: Random) -> RouterCore:
        """Return a core with these settings, of a router with its own id."""
        seed = rng.getrandbits(53)
        config = config_of({**self.settings, "name": f"simulated-{seed}"})
        return make_core(config, Random(seed))


def named_policy(spec: Spec, base: Mapping[str, Setting]) -> NamedPolicy:
    """Return a policy with the given options; others are as in `base`. Raises ConfigError."""
    for key in spec.values:
        if key not in DECISION_SETTINGS:
            raise ConfigError("policies", f"{key} in {spec.text!r}", ", ".join(DECISION_SETTINGS))
    named = {} if spec.name == RECORDED else {"policy": spec.name}
    given = checked(RouterConfig, {**named, **spec.values}, f"in {spec.text!r}")
    policy = NamedPolicy(spec.text, {**base, **given})
    policy.make_core(Random(0))  # rejects invalid settings before any run
    return policy


def default_settings() -> dict[str, Setting]:
    """Return the default settings of a router."""
    return decision_settings(RouterConfig())
