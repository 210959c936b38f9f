"""The authenticated caller, and its part of a shared fleet."""

from typing import Literal, TypeAlias, TypeVar, get_args

from msgspec import Struct

from router.errors import InvalidFieldError
from router.protocol.requests import BookRequest, PromptRequest, SelectRequest
from router.runtime.security.errors import ForbiddenError

TokenScope: TypeAlias = Literal["route", "admin", "metrics", "steer", "loads", "replicas"]
"""Scopes of a token.

`route`: selections and bookings; `admin`: all state; `metrics`: metrics; `steer`: fields of
completions that steer engines (`router/forward/permitted_fields.py`); `loads`: the load of every
rank, which forwarders need to list models, and which `admin` includes; `replicas`: the reservations
of all callers, which routers without a bus share.
"""

ANY = "*"
MAX_ID_CHARACTERS = 256

R = TypeVar("R", bound=PromptRequest)


class Caller(Struct, frozen=True):
    """The sender of a request. With a `tenant`, it is confined to it: see `bound` and `own_id`.

    `max_strict_priority`: the highest one of its requests; None: any, but 0 with a tenant.
    """

    name: str
    scopes: frozenset[TokenScope]
    tenant: str | None = None
    routing_groups: frozenset[str] = frozenset((ANY,))
    cache_salts: frozenset[str] = frozenset((ANY,))
    max_strict_priority: int | None = None

    def may(self, scope: TokenScope | None) -> bool:
        """Return whether the caller has this scope; None means that no scope is needed."""
        is_included = scope == "loads" and "admin" in self.scopes
        return scope is None or scope in self.scopes or is_included

    def check_precedence(self, request: PromptRequest) -> None:
        """Raise ForbiddenError if the request takes more precedence than this caller may have.

        A strict priority goes ahead of all other callers, and a prompt that does not count as load
        makes its rank look free to them.
        """
        if isinstance(request, SelectRequest):
            self._check_priority(request.strict_priority)
        if self.tenant is None or not isinstance(request, SelectRequest | BookRequest):
            return
        override = request.router_config_override
        if override is not None and override.track_prefill_tokens is False:
            field = "router_config_override.track_prefill_tokens"
            reason = "false hides this tenant's prompts from the placement of others"
            raise ForbiddenError(field, reason, "true, or none")

    def _check_priority(self, asked: int) -> None:
        most = self.max_strict_priority
        if most is None:
            most = asked if self.tenant is None else 0
        if asked > most:
            raise ForbiddenError(
                "strict_priority", f"{asked} is above this token's", f"0 to {most}"
            )

    def bound(self, request: R) -> R:
        """Return the request if the caller may make it. Raises ForbiddenError otherwise.

        If the caller is limited to certain salts, hashes that it computed itself are refused: a
        hash does not show its salt.
        """
        if self.tenant is None:
            return request
        self.check_group(request.routing_group)
        self.check_salt(request.cache_salt)
        for field in ("sequence_hashes", "block_hashes"):
            if getattr(request, field, None) is not None:
                self.check_hashes(field)
        return request

    def check_group(self, routing_group: str) -> None:
        """Raise ForbiddenError if the caller may not use this routing group."""
        _check("routing_group", routing_group, self.routing_groups)

    def check_salt(self, cache_salt: str | None) -> None:
        """Raise ForbiddenError if the caller may not use blocks under this salt."""
        _check("cache_salt", cache_salt or "", self.cache_salts)

    def check_hashes(self, field: str) -> None:
        """Raise ForbiddenError if the caller may not name blocks by its own hashes."""
        if ANY not in self.cache_salts:
            reason = "a hash hides its salt, and this token is limited to some salts"
            raise ForbiddenError(field, reason, "the prompt's tokens")

    def own_id(self, field: str, given: str) -> str:
        """Return an id of a request or session, prefixed by the tenant. Raises InvalidFieldError.

        The prefix keeps the ids of different tenants apart.
        """
        if self.tenant is None:
            return given
        own = f"{self.tenant}/{given}"
        if len(own) > MAX_ID_CHARACTERS:
            most = MAX_ID_CHARACTERS - len(self.tenant) - 1
            raise InvalidFieldError(field, f"{len(given)} characters", f"1 to {most}")
        return own

    def caller_id(self, own: str) -> str:
        """Return an id as the caller gave it, without the tenant's prefix."""
        return own if self.tenant is None else own.removeprefix(f"{self.tenant}/")


ANYBODY = Caller("anybody", frozenset(get_args(TokenScope)))
"""The caller of every request while no authentication is configured, with all scopes."""

STRANGER = Caller("stranger", frozenset())
"""The caller of a request without a valid token, on a route that needs none."""


def _check(field: str, value: str, allowed: frozenset[str]) -> None:
    if ANY not in allowed and value not in allowed:
        reason = f"{value!r} is not this token's" if value else "missing; this token needs one"
        raise ForbiddenError(field, reason, ", ".join(sorted(allowed)))
