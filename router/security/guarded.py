"""A guard before an ASGI application, and before a bus: clocks and headers, which the guard itself
does not know.
"""

import math
import time
from collections.abc import Mapping

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import KvRouterError
from router.security.caller import ANYBODY, Caller
from router.security.errors import ContentEncodingError
from router.security.guard import Guard, Headers


def admit(guard: Guard, method: str, path: str, headers: Headers) -> Caller:
    """Who asks. Raises what `Guard.admit` raises, and ContentEncodingError."""
    refuse_encodings(headers)
    if guard.is_idle:
        return ANYBODY
    return guard.admit(method, path, headers, time.monotonic(), time.time())


def identify(guard: Guard, headers: Mapping[str, str] | None) -> Caller:
    """Who asks over NATS, where what is asked is read afterwards; see `Guard.identify`. `headers`:
    under names in any case.
    """
    if guard.is_idle:
        return ANYBODY
    said = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return guard.identify(said, time.monotonic(), time.time())


def charge(guard: Guard, caller: Caller, items: int) -> None:
    """A request that was admitted had so many in it; see `Guard.charge`."""
    if items > 1 and not guard.is_idle:
        guard.charge(caller, items - 1, time.monotonic())


def refuse_encodings(headers: Headers) -> None:
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
            admit(self._guard, scope["method"], scope["path"], scope["headers"])
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
