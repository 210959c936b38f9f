"""Restriction of callers to their tenant's data, with a name space of ids per tenant.

A command is rewritten before its execution, by the rule of its type, and the reply after it. A
command without a rule is refused.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from msgspec.structs import replace

from router.api.caller_commands import (
    Book,
    CallerCommand,
    OverlapScores,
    PotentialLoads,
    Preview,
)
from router.api.errors import SelectionNotFoundError
from router.api.request_headers import bookable
from router.core.commands import Free, OutputBlock, PrefillComplete, Select, Submit
from router.errors import KvRouterError
from router.protocol.requests import BookRequest, SelectRequest
from router.runtime.security.caller import Caller
from router.runtime.security.errors import ForbiddenError
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError

OWN_IDS = ("request_id", "selection_id", "session_id")
"""Fields that identify a request later: each tenant has its own name space for them."""

REPLIED_IDS = ("request_id", "selection_id")
"""Those of them that replies contain."""


def check_precedence(command: CallerCommand, caller: Caller) -> None:
    """Raise ForbiddenError if a command takes more precedence than the caller may have."""
    request = getattr(command, "request", None)
    if request is not None:
        caller.check_precedence(request)


def to_tenant(command: Any, caller: Caller) -> CallerCommand:
    """Return a command restricted to the caller's tenant, under ids of its name space.

    Raises ForbiddenError, InvalidFieldError.
    """
    rule = RULES.get(type(command))
    if rule is None:
        raise ForbiddenError("authorization", "a tenant requests data of all", "a token with admin")
    return rule(command, caller)


def to_caller(reply: Any, caller: Caller) -> Any:
    """Return a reply with the ids that the caller used."""
    if reply is None:
        return None
    given = {
        name: caller.caller_id(own)
        for name in REPLIED_IDS
        if (own := getattr(reply, name, None)) is not None
    }
    return replace(reply, **given) if given else reply


def raise_to_caller(error: KvRouterError, caller: Caller) -> NoReturn:
    """Raise an error; one that names a request, with the id that the caller used."""
    if isinstance(error, ReservationNotFoundError | DuplicateReservationError):
        raise type(error)(caller.caller_id(error.request_id)) from error
    if isinstance(error, SelectionNotFoundError):
        given = caller.caller_id(error.selection_id)
        raise SelectionNotFoundError(given, error.model_name, error.routing_group) from error
    raise error


def _select(command: Select | Preview, caller: Caller) -> Select | Preview:
    return replace(command, request=_own_select(command.request, caller))


def _submit(command: Submit, caller: Caller) -> Submit:
    return Submit(_own_select(bookable(command.request), caller))


def _book(command: Book, caller: Caller) -> Book:
    """Restrict a booking. That of a selection has no prompt: the selection was restricted."""
    request = command.request
    if request.worker_id is None:
        caller.check_group(request.routing_group)
    else:
        caller.bound(request)
    return Book(replace(request, **_own_ids(request, caller)))


def _query(
    command: PotentialLoads | OverlapScores, caller: Caller
) -> PotentialLoads | OverlapScores:
    return replace(command, request=caller.bound(command.request))


def _report(
    command: PrefillComplete | OutputBlock | Free, caller: Caller
) -> PrefillComplete | OutputBlock | Free:
    return replace(command, request_id=caller.own_id("request_id", command.request_id))


def _own_select(request: SelectRequest, caller: Caller) -> SelectRequest:
    if request.tenant not in (None, caller.tenant):
        reason = f"{request.tenant!r} is not this token's"
        raise ForbiddenError("tenant", reason, f"{caller.tenant}, or none")
    own = _own_ids(caller.bound(request), caller)
    return replace(request, tenant=caller.tenant, **own)


def _own_ids(request: SelectRequest | BookRequest, caller: Caller) -> dict[str, str]:
    """Return the ids of a request in the tenant's name space."""
    return {
        name: caller.own_id(name, given)
        for name in OWN_IDS
        if (given := getattr(request, name, None)) is not None
    }


RULES: Mapping[type, Callable[[Any, Caller], CallerCommand]] = MappingProxyType(
    {
        Select: _select,
        Preview: _select,
        Submit: _submit,
        Book: _book,
        PotentialLoads: _query,
        OverlapScores: _query,
        PrefillComplete: _report,
        OutputBlock: _report,
        Free: _report,
    }
)
"""The rule of each command that a tenant may use. `ReadShadow` covers all tenants."""
