"""What may be said instead of a setting or a value that is refused."""

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from enum import Enum
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

_AT_MOST = 40
"""Names that are all listed; of more, nobody reads the line."""


def allowed_names(name: str, names: Collection[str]) -> str:
    """Those like an unknown one, or else all."""
    near = get_close_matches(name, names, n=3)
    if near:
        return " or ".join(near)
    return ", ".join(sorted(names)) if len(names) <= _AT_MOST else "what --help lists"


def allowed_values(hint: Any, error: msgspec.ValidationError) -> str:
    """Those of a type: each, if they are few, and else what was expected."""
    return ", ".join(_choices(hint)) or str(error).removeprefix("Expected ").partition(", got")[0]


def _choices(hint: Any) -> Iterator[str]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        yield from (str(each.value) for each in hint)
    elif get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    elif get_origin(hint) is Annotated:
        yield from _choices(get_args(hint)[0])
