"""A guard before an ASGI application: clocks and headers, which the guard itself does not know."""

import math
import time
from collections.abc import Iterable

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import KvRouterError
from router.security.caller import ANYBODY, Caller
from router.security.errors import ContentEncodingError
from router.security.guard import Guard


def admit(guard: Guard, scope: Scope) -> Caller:
    """Who asks. Raises what `Guard.admit` raises, and ContentEncodingError."""
    refuse_encodings(scope["headers"])
    if guard.is_idle:
        return ANYBODY
    path, headers = scope["path"], scope["headers"]
    return guard.admit(scope["method"], path, headers, time.monotonic(), time.time())


def refuse_encodings(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """A body is what was sent, of the size that was sent. Raises ContentEncodingError."""
    for name, value in headers:
        if name == b"content-encoding" and value.lower() != b"identity":
            raise ContentEncodingError(value.decode("latin-1")[:64])


class Guarded:
    """An application that only those reach whom the guard admits."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            admit(self._guard, scope)
        except KvRouterError as error:
            headers = [(b"content-type", b"application/json"), *refusal_headers(error)]
            start = {"type": "http.response.start", "status": error.http_status}
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": msgspec.json.encode(error.body())})
            return
        await self._app(scope, receive, send)


def refusal_headers(error: KvRouterError) -> tuple[tuple[bytes, bytes], ...]:
    """Beside a refusal: when to come again, and what to come with."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        headers = ((b"retry-after", b"%d" % math.ceil(error.retry_after_s)),)
    if error.http_status == 401:
        headers += ((b"www-authenticate", b"Bearer"),)
    return headers
