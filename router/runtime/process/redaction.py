"""Redaction of secrets and addresses in logs, errors, replies and shown settings.

A URL is taken apart by its delimiters, not by `urlsplit`: what is redacted is often wrong (a
password with `@` or `/` that is not encoded), and wrong URLs must not show their secrets either.
"""

import re

HIDDEN = "***"
SECRET = {"is_secret": True}
"""A mark for a setting that holds a secret itself: `Meta(extra=SECRET)`."""

_URL = re.compile(r"""(?P<scheme>[a-z][a-z0-9+.-]*)://[^\s"'<>]*""", re.IGNORECASE)
_NEXT_URL = re.compile(r",(?=[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]+")
_HIDDEN_CREDENTIALS = rf"\1 {HIDDEN}"
_PARAMETER = re.compile(r"(?<=[?&;#])(?P<name>[^=&;#]*)=[^&;#]*")
_SECRET_NAME = re.compile(r"pass|pwd|secret|token|key|auth|credential|sig", re.IGNORECASE)


def redact(text: str) -> str:
    """Return the text without secrets in URLs, and without credentials of HTTP headers.

    Of a URL, all before its last `@` is hidden, and the values of parameters whose names suggest a
    secret.
    """
    return _CREDENTIALS.sub(_HIDDEN_CREDENTIALS, _URL.sub(_without_secrets, text))


def without_addresses(text: str) -> str:
    """Return the text with schemes alone in place of URLs, for callers without authentication."""
    return _CREDENTIALS.sub(_HIDDEN_CREDENTIALS, _URL.sub(rf"\g<scheme>://{HIDDEN}", text))


def _without_secrets(found: re.Match[str]) -> str:
    return ",".join(map(_redacted_url, _NEXT_URL.split(found[0])))


def _redacted_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    _, at, place = rest.rpartition("@")
    shown = f"{HIDDEN}@{place}" if at else place
    return f"{scheme}://{_PARAMETER.sub(_shown_parameter, shown)}"


def _shown_parameter(found: re.Match[str]) -> str:
    name = found["name"]
    return f"{name}={HIDDEN}" if _SECRET_NAME.search(name) else found[0]
