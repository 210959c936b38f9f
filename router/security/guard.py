"""Who may ask what, and how often. Pure: files and clocks are others' business.

token ─▶ known? not expired? ─▶ scope of this route? ─▶ rates of token and tenant ─▶ Caller
           401                    403                           429
"""

from collections.abc import Iterable
from typing import TypeAlias

from router.security.caller import ANYBODY, Caller
from router.security.errors import ForbiddenError, RateLimitedError, UnauthenticatedError
from router.security.route_scopes import RouteScopes
from router.security.token_bucket import TokenBucket
from router.security.tokens import MAX_TOKEN_CHARACTERS, Token, TokenTable

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]


class Guard:
    """Admits requests, or refuses them. Without tokens everybody may do everything, as often as
    `default_requests_per_s` (of all of them together) allows.

    `default_requests_per_s` counts for each token without a limit of its own, too; 0: no limit.
    """

    __slots__ = ("_buckets", "_default_rate", "_scopes", "_table", "_tenant_buckets", "is_on")

    def __init__(self, default_requests_per_s: float = 0.0) -> None:
        self._default_rate = default_requests_per_s
        self._scopes = RouteScopes()
        self._table = TokenTable()
        self._buckets = {ANYBODY.name: _bucket(default_requests_per_s, None)}
        self._tenant_buckets: dict[str, TokenBucket] = {}
        self.is_on = False

    def replace(self, table: TokenTable) -> None:
        """From now on these tokens count, and no others. Who asked much before still has."""
        self._buckets = {
            token.caller.name: self._bucket_of(token.caller.name, self._rates(token))
            for token in table.tokens
        }
        self._tenant_buckets = {
            line.name: _again(
                self._tenant_buckets.get(line.name), line.requests_per_s, line.burst_requests
            )
            for line in table.tenants
        }
        self._table = table
        self.is_on = True

    @property
    def is_idle(self) -> bool:
        """Nobody is refused anything, so nobody need be asked."""
        return not self.is_on and not self._default_rate

    def is_open(self, method: str, path: str) -> bool:
        """Whether anybody may ask this, always."""
        return self._scopes.needed(method, path) is None

    @property
    def token_count(self) -> int:
        """Tokens that count."""
        return len(self._table.tokens)

    def admit(
        self, method: str, path: str, headers: Headers, now_s: float, unix_s: float
    ) -> Caller:
        """Who asks. Raises UnauthenticatedError, ForbiddenError, RateLimitedError."""
        if self.is_open(method, path):
            return ANYBODY
        caller = self._known(headers, unix_s)
        self.check_scope(caller, method, path)
        self._take(caller, now_s)
        return caller

    def identify(self, headers: Headers, now_s: float, unix_s: float) -> Caller:
        """Who asks something that is not read yet: `check_scope` once it is. Raises
        UnauthenticatedError, RateLimitedError.
        """
        caller = self._known(headers, unix_s)
        self._take(caller, now_s)
        return caller

    def check_scope(self, caller: Caller, method: str, path: str) -> None:
        """Raises ForbiddenError where a caller may not ask this."""
        needed = self._scopes.needed(method, path)
        if not caller.may(needed):
            reason = f"token {caller.name} lacks the scope {needed}"
            raise ForbiddenError("authorization", reason, f"a token with {needed}")

    def charge(self, caller: Caller, requests: int, now_s: float) -> None:
        """One request was as good as so many more: the next ones wait for that."""
        for bucket in self._buckets_of(caller):
            bucket.take(now_s, requests)

    def _known(self, headers: Headers, unix_s: float) -> Caller:
        return self._authenticated(headers, unix_s).caller if self.is_on else ANYBODY

    def _authenticated(self, headers: Headers, unix_s: float) -> Token:
        presented = [value for name, value in headers if name == b"authorization"]
        if len(presented) != 1:
            raise UnauthenticatedError("comes twice" if presented else "missing")
        kind, _, secret = presented[0].partition(b" ")
        if kind.lower() != b"bearer" or len(secret) > MAX_TOKEN_CHARACTERS:
            raise UnauthenticatedError("no bearer token")
        token = self._table.find(secret.strip())
        if token is None:
            raise UnauthenticatedError("unknown token")
        if token.is_expired(unix_s):
            raise UnauthenticatedError(f"token {token.caller.name} has expired")
        return token

    def _buckets_of(self, caller: Caller) -> list[TokenBucket]:
        """A token that was taken out meanwhile has none any more."""
        found = (self._buckets.get(caller.name), self._tenant_buckets.get(caller.tenant or ""))
        return [bucket for bucket in found if bucket is not None]

    def _take(self, caller: Caller, now_s: float) -> None:
        """A request that one bucket refuses takes nothing from any."""
        buckets = self._buckets_of(caller)
        for bucket in buckets:
            wait_s = bucket.wait_s(now_s)
            if wait_s:
                who = caller.name if bucket is self._buckets.get(caller.name) else caller.tenant
                raise RateLimitedError(who or caller.name, bucket.rate, wait_s)
        for bucket in buckets:
            bucket.take(now_s)

    def _rates(self, token: Token) -> tuple[float, float | None]:
        if token.requests_per_s is None:
            return self._default_rate, token.burst_requests
        return token.requests_per_s, token.burst_requests

    def _bucket_of(self, name: str, rates: tuple[float, float | None]) -> TokenBucket:
        return _again(self._buckets.get(name), *rates)


def _bucket(rate: float, burst: float | None) -> TokenBucket:
    """A burst is a second's requests unless said."""
    return TokenBucket(rate, rate if burst is None else burst)


def _again(known: TokenBucket | None, rate: float, burst: float | None) -> TokenBucket:
    fresh = _bucket(rate, burst)
    return fresh if known is None else known.resized(fresh.rate, fresh.burst)
