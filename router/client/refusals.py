"""The router's errors, rebuilt from what it says of them."""

from functools import cache
from typing import Any, TypeGuard, get_type_hints

import msgspec

from router import (
    body_errors,
    bus_errors,
    errors,
    index_errors,
    placement_errors,
    queue_errors,
    registration_errors,
)
from router.client.errors import RefusedError
from router.errors import KvRouterError
from router.security import errors as security_errors

_MODULES = (
    errors,
    body_errors,
    bus_errors,
    index_errors,
    placement_errors,
    queue_errors,
    registration_errors,
    security_errors,
)


def rebuilt(body: object, status: int, retry_after: str | None) -> KvRouterError:
    """The error that a router refused with. `retry_after`: the header, in seconds, if it came."""
    said = dict(body) if isinstance(body, dict) else {}
    error_type = _types().get(said.get("code", ""))
    if error_type is None:
        error: KvRouterError = RefusedError(status, said)
    else:
        error = error_type.__new__(error_type)
        error.args = (said.get("error", error_type.code),)
        vars(error).update(_fields(error_type, said), _status=status)
    if error.retry_after_s is None and retry_after is not None and retry_after.isdecimal():
        error.retry_after_s = float(retry_after)
    return error


@cache
def _types() -> dict[str, type[KvRouterError]]:
    """By code, where one type has it."""
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


def _fields(error_type: type[KvRouterError], said: dict[str, Any]) -> dict[str, Any]:
    """An error's own fields, of the types that it has them in where it says so."""
    hints = get_type_hints(error_type.__init__)
    return {
        name: _converted(value, hints.get(name, Any))
        for name, value in said.items()
        if name not in ("error", "code", "method")
    }


def _converted(value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except (msgspec.ValidationError, TypeError):
        return value
