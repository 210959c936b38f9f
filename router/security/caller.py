"""Who asks, and what of a shared fleet is theirs."""

from typing import Literal, TypeAlias, TypeVar

from msgspec import Struct

from router.errors import InvalidFieldError
from router.protocol.requests import PromptRequest
from router.security.errors import ForbiddenError

TokenScope: TypeAlias = Literal["route", "admin", "metrics"]
"""What a token is good for: deciding and booking; looking at and changing everything; metrics."""

ANY = "*"
MAX_ID_CHARACTERS = 256

R = TypeVar("R", bound=PromptRequest)


class Caller(Struct, frozen=True):
    """Who asks. Bound to a `tenant`, it sees nothing of others: see `bound` and `own_id`."""

    name: str
    scopes: frozenset[TokenScope]
    tenant: str | None = None
    routing_groups: frozenset[str] = frozenset((ANY,))
    cache_salts: frozenset[str] = frozenset((ANY,))

    def may(self, scope: TokenScope | None) -> bool:
        """Whether it has this scope; None: nobody needs one."""
        return scope is None or scope in self.scopes

    def bound(self, request: R) -> R:
        """The request, if it stays within what is this caller's. Raises ForbiddenError.

        Where a caller may use certain salts only, hashes it computed itself are refused: nobody can
        tell under whose salt.
        """
        if self.tenant is None:
            return request
        self.check_group(request.routing_group)
        if ANY not in self.cache_salts:
            _check("cache_salt", request.cache_salt or "", self.cache_salts)
        for field in ("sequence_hashes", "block_hashes"):
            if getattr(request, field, None) is not None:
                self.check_hashes(field)
        return request

    def check_group(self, routing_group: str) -> None:
        """Raises ForbiddenError for a routing group that is not this caller's."""
        _check("routing_group", routing_group, self.routing_groups)

    def check_hashes(self, field: str) -> None:
        """Raises ForbiddenError for a caller that may not name blocks by hashes of its own."""
        if ANY not in self.cache_salts:
            reason = "of blocks under any salt, by a token that is bound to some"
            raise ForbiddenError(field, reason, "the prompt's tokens")

    def own_id(self, field: str, given: str) -> str:
        """A request's or session's id, as no other tenant can say it. Raises InvalidFieldError."""
        if self.tenant is None:
            return given
        own = f"{self.tenant}/{given}"
        if len(own) > MAX_ID_CHARACTERS:
            most = MAX_ID_CHARACTERS - len(self.tenant) - 1
            raise InvalidFieldError(field, f"{len(given)} characters", f"1 to {most}")
        return own

    def given_id(self, own: str) -> str:
        """An id as this caller gave it."""
        return own if self.tenant is None else own.removeprefix(f"{self.tenant}/")


ANYBODY = Caller("anybody", frozenset(("route", "admin", "metrics")))
"""Who asks where nobody has to say who he is."""


def _check(field: str, value: str, allowed: frozenset[str]) -> None:
    if ANY not in allowed and value not in allowed:
        reason = f"{value!r} is not this token's" if value else "missing; this token needs one"
        raise ForbiddenError(field, reason, ", ".join(sorted(allowed)))
