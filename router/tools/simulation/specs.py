"""`NAME:key=value,key=value` on the command line, and several of them with blanks between."""

from collections.abc import Mapping
from typing import TypeVar

from msgspec import Struct, ValidationError, convert

from router.errors import ConfigError

T = TypeVar("T")


class Spec(Struct, frozen=True):
    """A name, and what is said of it; `text` as it was given."""

    text: str
    name: str
    values: Mapping[str, str]

    def converted(self, flag: str, kind: type[T]) -> T:
        """The values as a struct. Raises ConfigError."""
        try:
            return convert(dict(self.values), kind, strict=False)
        except ValidationError as error:
            allowed = ", ".join(kind.__struct_fields__)  # type: ignore[attr-defined]
            raise ConfigError(flag, f"{self.text!r}: {error}", allowed) from error


def parsed_spec(flag: str, text: str) -> Spec:
    """The parts of a specification. Raises ConfigError."""
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
    """Specifications with blanks between, at least one. Raises ConfigError."""
    specs = [parsed_spec(flag, word) for word in text.split()]
    if not specs:
        raise ConfigError(flag, "empty", "one or more, with blanks between")
    return specs


def parsed_numbers(flag: str, text: str, kind: type[T]) -> list[T]:
    """Numbers of a constrained type with blanks between, at least one. Raises ConfigError."""
    try:
        numbers = [convert(word, kind, strict=False) for word in text.split()]
    except ValidationError as error:
        raise ConfigError(flag, repr(text), str(error)) from error
    if not numbers:
        raise ConfigError(flag, "empty", "one or more numbers, with blanks between")
    return numbers
