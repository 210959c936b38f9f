"""Errors of the client, besides the router's own errors, which are raised with their own types.

KvRouterError ├── UnansweredError      no router responded └── RefusedError         a router
refused, with a code that this version does not know
"""

from functools import cache
from typing import Any, TypeGuard, get_type_hints

import msgspec

from router import errors
from router.api import errors as api_errors
from router.core import errors as core_errors
from router.errors import KvRouterError
from router.indexer import errors as index_errors
from router.ingest import errors as ingest_errors
from router.protocol.values import U32_MAX, number_in
from router.runtime.bus import errors as bus_errors
from router.runtime.process import errors as body_errors
from router.runtime.security import errors as security_errors
from router.scheduler import errors as placement_errors
from router.scheduler.queue import errors as queue_errors
from router.sequence.active import errors as booking_errors


class UnansweredError(KvRouterError):
    """No router responded. `is_maybe_done`: the request may have been executed nevertheless."""

    code = "unanswered"
    http_status = 503

    def __init__(self, router: str, reason: str, *, is_maybe_done: bool) -> None:
        super().__init__(f"{router}: {reason}")
        self.router = router
        self.reason = reason
        self.is_maybe_done = is_maybe_done


class RefusedError(KvRouterError):
    """An error of a router or an intermediary with a code that this version does not know."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(str(body.get("error", f"refused with status {status}")))
        self.http_status = status  # type: ignore[misc]
        self.code = str(body.get("code", "refused"))  # type: ignore[misc]
        self.fields = body


_MODULES = (
    errors,
    api_errors,
    body_errors,
    booking_errors,
    bus_errors,
    core_errors,
    index_errors,
    ingest_errors,
    placement_errors,
    queue_errors,
    security_errors,
)


def rebuilt(body: object, status: int, retry_after: str | None) -> KvRouterError:
    """Return the error of a response. `retry_after`: the header, in seconds, if present."""
    content = dict(body) if isinstance(body, dict) else {}
    code = content.get("code")
    error_type = _types().get(code) if isinstance(code, str) else None
    if error_type is None:
        error: KvRouterError = RefusedError(status, content)
    else:
        error = error_type.__new__(error_type)
        error.args = (content.get("error", error_type.code),)
        vars(error).update(_fields(error_type, content), _status=status)
    delay_s = None if retry_after is None else number_in(retry_after, U32_MAX)
    if error.retry_after_s is None and delay_s is not None:
        error.retry_after_s = float(delay_s)
    return error


@cache
def _types() -> dict[str, type[KvRouterError]]:
    """Return the error types by code, without codes that several types share."""
    found: dict[str, list[type[KvRouterError]]] = {}
    for module in _MODULES:
        for each in vars(module).values():
            if _is_error_of(module.__name__, each):
                found.setdefault(each.code, []).append(each)
    return {code: types[0] for code, types in found.items() if len(types) == 1}


def _is_error_of(module: str, each: object) -> TypeGuard[type[KvRouterError]]:
    if not (isinstance(each, type) and issubclass(each, KvRouterError)):
        return False
    return each.__module__ == module and "code" in vars(each)


def _fields(error_type: type[KvRouterError], content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an error, converted to the types of its constructor's hints."""
    hints = get_type_hints(error_type.__init__)
    return {
        name: _converted(value, hints.get(name, Any))
        for name, value in content.items()
        if name not in ("error", "code", "method")
    }


def _converted(value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except (msgspec.ValidationError, TypeError):
        return value
