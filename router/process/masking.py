"""Secrets are shown to nobody, whatever text they have got into."""

import re

_MASKS = (
    (re.compile(r"(?<=://)[^/@\s]*@"), "***@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]+"), r"\1 ***"),
)


def masked(text: str) -> str:
    """The text without user information of URLs and without credentials of HTTP headers."""
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text
