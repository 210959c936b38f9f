"""Authentication, authorization and rate limits of requests. Pure: no files and no clocks.

token ─▶ known? not expired? ─▶ scope of this route? ─▶ rates of token and tenant ─▶ Caller
           401                    403                           429
"""

from collections import OrderedDict
from collections.abc import Iterable
from math import inf
from typing import TypeAlias

from msgspec import Struct

from router.runtime.security.caller import ANYBODY, STRANGER, Caller
from router.runtime.security.errors import ForbiddenError, RateLimitedError, UnauthenticatedError
from router.runtime.security.route_scopes import PROBES, RouteScopes
from router.runtime.security.tokens import MAX_TOKEN_CHARACTERS, Token, TokenTable

MOST_ADDRESSES = 4096


class TokenBucket:
    """Fills at `rate` per second up to `burst`; a request takes one. A rate of 0 never refuses.

    Invariant: the content is at most `burst`. It is below 0 after a request took more than the
    bucket held.
    """

    __slots__ = ("_full_s", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = max(burst, 1.0)
        # The time at which the bucket is full is its whole state: it needs no timer to fill.
        self._full_s = -inf

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next request may come; 0: now."""
        if not self.rate:
            return 0.0
        return max(0.0, self._full_s - now_s - (self.burst - 1.0) / self.rate)

    def take(self, now_s: float, requests: int = 1) -> None:
        """Take `requests` requests."""
        if self.rate:
            self._full_s = max(self._full_s, now_s) + requests / self.rate

    def resized(self, rate: float, burst: float) -> "TokenBucket":
        """Return this bucket if the limits are the same, otherwise a new, full one."""
        same = (self.rate, self.burst) == (rate, max(burst, 1.0))
        return self if same else TokenBucket(rate, burst)


class StrangerRates:
    """The rate of each address without a token. Beyond `MOST_ADDRESSES`, the oldest is dropped."""

    __slots__ = ("_buckets", "_rate")

    def __init__(self, requests_per_s: float) -> None:
        self._rate = requests_per_s
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, address: str, now_s: float) -> None:
        """Take one request of an address. Raises RateLimitedError."""
        bucket = self._buckets.pop(address, None) or TokenBucket(self._rate, 2 * self._rate)
        self._buckets[address] = bucket
        if len(self._buckets) > MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        wait_s = bucket.wait_s(now_s)
        if wait_s:
            raise RateLimitedError("requests without a token", self._rate, wait_s)
        bucket.take(now_s)


Headers: TypeAlias = Iterable[tuple[bytes, bytes]]


class Access(Struct, frozen=True):
    """The right of a caller to a route that needs a token, until `table` is replaced.

    `is_limited`: each request needs `Guard.take`.
    """

    table: TokenTable
    caller: Caller
    expires_unix_s: float | None
    is_limited: bool


class Guard:
    """Admits requests or refuses them.

    `default_requests_per_s`: the rate of each token without a limit of its own; 0: unlimited.
    Without tokens every request is allowed, within that rate for all callers together.
    `open_requests_per_s`: the rate of each address without a token, of open routes but probes.
    `is_idle`: no request can be refused, so `admit` need not be called. `table`: the valid tokens.
    """

    __slots__ = (
        "_buckets",
        "_default_rate",
        "_scopes",
        "_strangers",
        "_tenant_buckets",
        "is_idle",
        "is_on",
        "table",
    )

    def __init__(
        self, default_requests_per_s: float = 0.0, open_requests_per_s: float = 0.0
    ) -> None:
        self._default_rate = default_requests_per_s
        self._strangers = StrangerRates(open_requests_per_s)
        self._scopes = RouteScopes()
        self.table = TokenTable()
        self._buckets = {ANYBODY.name: _bucket(default_requests_per_s, None)}
        self._tenant_buckets: dict[str, TokenBucket] = {}
        self.is_on = False
        self.is_idle = not default_requests_per_s

    def replace(self, table: TokenTable) -> None:
        """Replace all tokens. The rate-limit state of a token with unchanged limits is kept."""
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
        self.table = table
        self.is_on, self.is_idle = True, False

    def set_rates(self, default_requests_per_s: float, open_requests_per_s: float) -> None:
        """Change both rates; every `Access` is stale then. Addresses start with a full burst."""
        self._default_rate = default_requests_per_s
        self._strangers = StrangerRates(open_requests_per_s)
        table = TokenTable(self.table.tokens, self.table.tenants)
        if self.is_on:
            self.replace(table)
            return
        self.table = table
        self._buckets = {ANYBODY.name: self._bucket_of(ANYBODY.name, (self._default_rate, None))}
        self.is_idle = not default_requests_per_s

    def is_open(self, method: str, path: str) -> bool:
        """Return whether this route needs no token."""
        return self._scopes.needed(method, path) is None

    @property
    def token_count(self) -> int:
        """The number of valid tokens."""
        return len(self.table.tokens)

    def admit(
        self,
        method: str,
        path: str,
        headers: Headers,
        now_s: float,
        unix_s: float,
        address: str = "",
    ) -> Caller:
        """Return the caller. Raises UnauthenticatedError, ForbiddenError, RateLimitedError.

        `address`: of the connection; one rate for all that have none.
        """
        if self.is_open(method, path):
            caller = self._known_or_stranger(headers, unix_s)
            if caller is STRANGER and path not in PROBES:
                self._strangers.take(address, now_s)
            return caller
        access = self.access(method, path, headers, unix_s)
        self._take(access.caller, now_s)
        return access.caller

    def access(self, method: str, path: str, headers: Headers, unix_s: float) -> Access:
        """Return the access of a request to a route that needs a token; its rates are not used.

        Raises UnauthenticatedError, ForbiddenError.
        """
        caller, expires_unix_s = ANYBODY, None
        if self.is_on:
            token = self._authenticated(headers, unix_s)
            caller, expires_unix_s = token.caller, token.expires_unix_s
        self.check_scope(caller, method, path)
        has_rate = any(bucket.rate for bucket in self._buckets_of(caller))
        is_limited = has_rate or expires_unix_s is not None
        return Access(self.table, caller, expires_unix_s, is_limited)

    def take(self, access: Access, now_s: float, unix_s: float) -> None:
        """Take a request of an access that is limited.

        Raises UnauthenticatedError if its token has expired, RateLimitedError.
        """
        if access.expires_unix_s is not None and unix_s >= access.expires_unix_s:
            raise UnauthenticatedError(f"token {access.caller.name} has expired")
        self._take(access.caller, now_s)

    def identify(self, headers: Headers, now_s: float, unix_s: float) -> Caller:
        """Return the caller of a request that is not parsed yet; call `check_scope` once it is.

        Raises UnauthenticatedError, RateLimitedError.
        """
        caller = self._known(headers, unix_s)
        self._take(caller, now_s)
        return caller

    def still_admits(self, method: str, path: str, headers: Headers, unix_s: float) -> bool:
        """Return whether an admitted request would still be: its token exists, with its scope."""
        try:
            self.check_scope(self._known(headers, unix_s), method, path)
        except (UnauthenticatedError, ForbiddenError):
            return False
        return True

    def check_scope(self, caller: Caller, method: str, path: str) -> None:
        """Raise ForbiddenError if the caller may not use this route."""
        needed = self._scopes.needed(method, path)
        if not caller.may(needed):
            reason = f"token {caller.name} lacks the scope {needed}"
            raise ForbiddenError("authorization", reason, f"a token with {needed}")

    def charge(self, caller: Caller, requests: int, now_s: float) -> None:
        """Count `requests` more requests for an admitted one; later requests wait for them."""
        for bucket in self._buckets_of(caller):
            bucket.take(now_s, requests)

    def _known_or_stranger(self, headers: Headers, unix_s: float) -> Caller:
        """Return the caller; a token that is not valid counts as none, and its rate is not used."""
        try:
            return self._known(headers, unix_s)
        except UnauthenticatedError:
            return STRANGER

    def _known(self, headers: Headers, unix_s: float) -> Caller:
        return self._authenticated(headers, unix_s).caller if self.is_on else ANYBODY

    def _authenticated(self, headers: Headers, unix_s: float) -> Token:
        presented = _presented(headers)
        if len(presented) != 1:
            raise UnauthenticatedError("given twice" if presented else "missing")
        kind, _, secret = presented[0].partition(b" ")
        if kind.lower() != b"bearer" or len(secret) > MAX_TOKEN_CHARACTERS:
            raise UnauthenticatedError("no bearer token")
        token = self.table.find(secret.strip())
        if token is None:
            raise UnauthenticatedError("unknown token")
        if token.is_expired(unix_s):
            raise UnauthenticatedError(f"token {token.caller.name} has expired")
        return token

    def _buckets_of(self, caller: Caller) -> list[TokenBucket]:
        """Return the buckets of a caller; a token that was removed meanwhile has none."""
        found = (self._buckets.get(caller.name), self._tenant_buckets.get(caller.tenant or ""))
        return [bucket for bucket in found if bucket is not None]

    def _take(self, caller: Caller, now_s: float) -> None:
        """Take one request from all buckets; a request that one bucket refuses takes from none."""
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
    """Return a new bucket; the default burst is the requests of one second."""
    return TokenBucket(rate, rate if burst is None else burst)


def _again(known: TokenBucket | None, rate: float, burst: float | None) -> TokenBucket:
    fresh = _bucket(rate, burst)
    return fresh if known is None else known.resized(fresh.rate, fresh.burst)


def _presented(headers: Headers) -> list[bytes]:
    """Return the credentials of a request; Anthropic's clients send a token as `x-api-key`."""
    given = [pair for pair in headers if pair[0] in (b"authorization", b"x-api-key")]
    bearer = [value for name, value in given if name == b"authorization"]
    return bearer or [b"Bearer " + value for _, value in given]
