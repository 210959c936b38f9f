"""The guard applied to an ASGI application and to a bus: adds clocks and headers."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import KvRouterError
from router.runtime.process.errors import UnsupportedMediaTypeError
from router.runtime.process.redaction import without_addresses
from router.runtime.security.caller import ANYBODY, Caller
from router.runtime.security.errors import (
    ContentEncodingError,
    CrossSiteError,
    ForbiddenError,
)
from router.runtime.security.guard import Access, Guard, Headers

_READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""

_FORMS = (b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain")
"""Content types that a page may send to another site without asking it first."""


NO_ORIGINS: frozenset[bytes] = frozenset()


def admit(
    guard: Guard,
    method: str,
    path: str,
    headers: Headers,
    address: str = "",
    origins: frozenset[bytes] = NO_ORIGINS,
) -> Caller:
    """Return the caller. `origins`: those whose pages may send requests.

    Raises the errors of `Guard.admit`, and ContentEncodingError, CrossSiteError.
    """
    refuse_encodings(headers)
    if method not in _READING:
        refuse_other_sites(headers, origins)
    if guard.is_idle:
        return ANYBODY
    return guard.admit(method, path, headers, time.monotonic(), time.time(), address)


def access_of(
    guard: Guard, method: str, path: str, headers: Headers, origins: frozenset[bytes] = NO_ORIGINS
) -> Access:
    """Return the access of requests with these headers to a route that needs a token.

    `origins`: those whose pages may send requests.

    Raises the errors of `Guard.access`, and ContentEncodingError, CrossSiteError.
    """
    refuse_encodings(headers)
    if method not in _READING:
        refuse_other_sites(headers, origins)
    return guard.access(method, path, headers, time.time())


class SharedHead(Protocol):
    """The head of requests with the same headers. `access`: of their caller, once one was let in.

    A token may expire, which ends the access to a route that needs one, and makes its caller a
    stranger on an open one: there the headers are checked with each request.
    """

    access: Access | None


def admit_head(
    guard: Guard,
    head: SharedHead,
    method: str,
    path: str,
    headers: Headers,
    origins: frozenset[bytes] = NO_ORIGINS,
) -> Caller:
    """Return the caller of a request with this head, as `admit` does.

    Its headers are checked once, and again whenever the tokens are replaced.
    """
    access = head.access
    if access is None or access.table is not guard.table:
        if guard.is_open(method, path):
            return admit(guard, method, path, headers, "", origins)
        access = head.access = access_of(guard, method, path, headers, origins)
    if access.is_limited:
        guard.take(access, time.monotonic(), time.time())
    return access.caller


def identify(guard: Guard, headers: Mapping[str, str] | None) -> Caller:
    """Return the caller of a NATS request before its subject is read; see `Guard.identify`.

    `headers`: names in any case.
    """
    if guard.is_idle:
        return ANYBODY
    pairs = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return guard.identify(pairs, time.monotonic(), time.time())


def charge(guard: Guard, caller: Caller, items: int) -> None:
    """Count the `items` of an admitted batch as requests; see `Guard.charge`."""
    if items > 1 and not guard.is_idle:
        guard.charge(caller, items - 1, time.monotonic())


def refuse_encodings(headers: Headers) -> None:
    """Raise ContentEncodingError for a compressed body: its decoded size is not bounded."""
    for name, value in headers:
        if name == b"content-encoding" and value.lower() != b"identity":
            raise ContentEncodingError(value.decode("latin-1")[:64])


def refuse_other_sites(headers: Headers, origins: frozenset[bytes] = NO_ORIGINS) -> None:
    """Raise CrossSiteError for a request from a page of another site, as browsers mark it.

    `origins`: of other sites whose pages may send requests.

    Only browsers send these headers. They add no bearer token by themselves, so a request with one
    is of a caller that has it, whatever page it serves.
    """
    found = dict(headers)
    if found.get(b"authorization", b"")[:7].lower() == b"bearer " or b"x-api-key" in found:
        return
    site, origin = found.get(b"sec-fetch-site"), found.get(b"origin")
    if origin in origins:
        return
    if site is not None:
        if site not in (b"same-origin", b"none"):
            raise CrossSiteError("sec-fetch-site", site.decode("latin-1")[:64])
    elif (
        origin is not None
        and origin.partition(b"://")[2].lower() != found.get(b"host", b"").lower()
    ):
        raise CrossSiteError("origin", origin.decode("latin-1")[:256])


def refuse_forms(headers: Headers) -> None:
    """Raise UnsupportedMediaTypeError for a body that a browser's form can send, or an untyped one.

    For requests that change something, and whose route does not check the type itself.
    """
    found = dict(headers)
    kind = found.get(b"content-type", b"").partition(b";")[0].strip().lower()
    has_body = found.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in found
    if kind in _FORMS or (has_body and not kind):
        raise UnsupportedMediaTypeError(kind.decode("latin-1") or None)


class Guarded:
    """An ASGI application behind a guard."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            admit_request(self._guard, scope)
        except KvRouterError as error:
            headers = [(b"content-type", b"application/json"), *refusal_headers(error)]
            start = {"type": "http.response.start", "status": error.http_status}
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": msgspec.json.encode(error.body())})
            return
        await self._app(scope, receive, send)


def admit_request(guard: Guard, scope: Scope, origins: frozenset[bytes] = NO_ORIGINS) -> None:
    """Admit a request of an application; `caller_of` returns its caller from then on.

    Raises the errors of `admit`, and UnsupportedMediaTypeError.
    """
    client = scope.get("client")
    address = client[0] if client else ""
    caller = admit(guard, scope["method"], scope["path"], scope["headers"], address, origins)
    if scope["method"] not in _READING:
        refuse_forms(scope["headers"])
    scope.setdefault("state", {}).update(caller=caller, guard=guard)


def caller_of(scope: Scope) -> Caller:
    """Return the caller of an admitted request of an application."""
    caller: Caller = scope.get("state", {}).get("caller", ANYBODY)
    return caller


def is_still_admitted(scope: Scope) -> bool:
    """Return whether an admitted request would still be; for responses without an end."""
    guard: Guard | None = scope.get("state", {}).get("guard")
    return guard is None or guard.still_admits(
        scope["method"], scope["path"], scope["headers"], time.time()
    )


def is_detailed(caller: Caller, query: bytes) -> bool:
    """Return whether a probe asks for details (`?verbose`). Raises ForbiddenError without `admin`.

    Probes are open to strangers, so their details are not.
    """
    if b"verbose" not in [pair.partition(b"=")[0] for pair in query.split(b"&")]:
        return False
    if not caller.may("admin"):
        raise ForbiddenError("verbose", "this caller sees no details", "a token with admin")
    return True


def shown_reason(caller: Caller, reasons: Iterable[str]) -> str | None:
    """Return the reasons, or None without any; addresses are shown with scope `admin` alone."""
    reason = "; ".join(reasons)
    if not reason:
        return None
    return reason if caller.may("admin") else without_addresses(reason)


def refusal_headers(error: KvRouterError) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of an error response: `retry-after` and `www-authenticate`."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        headers = ((b"retry-after", b"%d" % math.ceil(error.retry_after_s)),)
    if error.http_status == 401:
        headers += ((b"www-authenticate", b"Bearer"),)
    return headers
