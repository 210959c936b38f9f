"""What goes back to a caller, and the one shape of every refusal: `{"error": …, "code": …}` and the
error's own fields.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from router.errors import KvRouterError
from router.process.fields import warning
from router.security.guarded import refusal_headers

log = logging.getLogger(__name__)


class Answer(Struct, frozen=True):
    """A JSON body, its status, and headers beside those that tell its type and length."""

    body: bytes
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def with_header(self, name: bytes, value: str) -> "Answer":
        """The same, and one header more."""
        return Answer(self.body, self.status, (*self.headers, (name, value.encode())))


INTERNAL = 500

OK = Answer(b'{"status":"ok"}')


def answer(value: Any, status: int = 200) -> Answer:
    """A value, as JSON."""
    return Answer(msgspec.json.encode(value), status)


def warned(body: bytes, unknown: Sequence[str]) -> bytes:
    """The answer to a body with fields that nobody knows: an object says so in `warnings`."""
    if not unknown or not body.startswith(b"{"):
        return body
    warnings = msgspec.json.encode([warning(field) for field in unknown])
    return b'%s,"warnings":%s}' % (body[:-1], warnings)


def refusal(error: KvRouterError) -> Answer:
    """An error, as callers see it. What is nobody's fault but ours is logged where all can see."""
    is_ours = error.http_status == INTERNAL
    log.log(logging.ERROR if is_ours else logging.DEBUG, "refused (%s): %s", error.code, error)
    return Answer(msgspec.json.encode(error.body()), error.http_status, refusal_headers(error))
