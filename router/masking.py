"""Secrets are shown to nobody, whatever text they have got into."""

import re
from functools import cache
from typing import Any, get_args, get_type_hints

from msgspec import Meta, Struct

HIDDEN = "***"
SECRET = {"is_secret": True}
"""`Meta(extra=SECRET)` marks a setting whose value is a secret itself."""

_MASKS = (
    (re.compile(r"(?<=://)[^/@\s]*@"), "***@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]+"), r"\1 ***"),
)


def masked(text: str) -> str:
    """The text without user information of URLs and without credentials of HTTP headers."""
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text


@cache
def is_secret(config_type: type[Struct], name: str) -> bool:
    """Whether the value of a setting is a secret."""
    hint: Any = get_type_hints(config_type, include_extras=True).get(name)
    return any(isinstance(m, Meta) and (m.extra or {}) == SECRET for m in get_args(hint))
