"""The file of bearer tokens, and the lookup of a presented token.

    [[tokens]]
    name = "gateway"
    token_sha256 = "9f86d081…"       # or token = "…", at least 16 characters
    scopes = ["route"]               # route, admin, metrics, steer, loads, replicas
    tenant = "acme"                  # this and the following fields are optional
    routing_groups = ["acme"]        # default "*": any
    cache_salts = ["acme"]           # default: the tenant's name
    max_strict_priority = 0          # default: 0 with a tenant, otherwise any
    requests_per_s = 100
    burst_requests = 200
    expires = 2027-01-01T00:00:00Z

    [[tenants]]                      # limits of all tokens of a tenant together
    name = "acme"
    requests_per_s = 500

The file is the only source of tokens: removing a line revokes its token.
"""

import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from hmac import compare_digest
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from router.errors import ConfigError
from router.protocol.values import U32_MAX
from router.runtime.security.caller import ANY, Caller, TokenScope

KEY = "token_file"
MAX_TOKENS = 1024
MAX_TOKEN_CHARACTERS = 4096

Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
TenantName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Listed: TypeAlias = list[Annotated[str, Meta(min_length=1, max_length=256)]]


class TokenLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A token's entry in the file."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    scopes: Annotated[list[TokenScope], Meta(min_length=1)]
    token: Annotated[str, Meta(min_length=16, max_length=MAX_TOKEN_CHARACTERS)] | None = None
    token_sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    tenant: TenantName | None = None
    routing_groups: Listed | None = None
    cache_salts: Listed | None = None
    max_strict_priority: Annotated[int, Meta(ge=0, le=U32_MAX)] | None = None
    requests_per_s: Rate | None = None
    burst_requests: Rate | None = None
    expires: datetime | None = None


class TenantLine(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of all tokens of a tenant together."""

    name: TenantName
    requests_per_s: Rate
    burst_requests: Rate | None = None


class TokenFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a token file."""

    tokens: Annotated[list[TokenLine], Meta(max_length=MAX_TOKENS)] = []
    tenants: Annotated[list[TenantLine], Meta(max_length=MAX_TOKENS)] = []


class Token(Struct, frozen=True):
    """A valid token: its digest, its caller and its limits."""

    digest: bytes
    caller: Caller
    requests_per_s: float | None
    burst_requests: float | None
    expires_unix_s: float | None

    def is_expired(self, unix_s: float) -> bool:
        """Return whether the token has expired."""
        return self.expires_unix_s is not None and unix_s >= self.expires_unix_s


class TokenTable:
    """Tokens, and limits of tenants. `find` takes the same time for every presented token."""

    __slots__ = ("tenants", "tokens")

    def __init__(self, tokens: Sequence[Token] = (), tenants: Sequence[TenantLine] = ()) -> None:
        self.tokens = tuple(tokens)
        self.tenants = tuple(tenants)

    def find(self, presented: bytes) -> Token | None:
        """Return the presented token, expired or not, or None. O(tokens): compares all of them."""
        digest, found = sha256(presented).digest(), None
        for token in self.tokens:
            if compare_digest(digest, token.digest):
                found = token
        return found


def read_tokens(text: str) -> TokenTable:
    """Parse a token file. Raises ConfigError, which contains no token."""
    try:
        fields = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # The error message contains positions only, no content of the file.
        raise ConfigError(KEY, str(error), "a TOML file of [[tokens]]") from error
    try:
        file = msgspec.convert(fields, TokenFile)
    except msgspec.ValidationError as error:
        raise ConfigError(KEY, str(error), "see router/runtime/security/README.md") from error
    tokens = [_token(line) for line in file.tokens]
    _refuse_twice("name", [line.name for line in file.tokens])
    _refuse_twice("token", [token.digest for token in tokens])
    _refuse_twice("tenant", [line.name for line in file.tenants])
    return TokenTable(tokens, file.tenants)


def _token(line: TokenLine) -> Token:
    if (line.token is None) == (line.token_sha256 is None):
        raise ConfigError(KEY, f"{line.name}: needs a token", "either token or token_sha256")
    if line.tenant is None and (line.routing_groups or line.cache_salts):
        raise ConfigError(KEY, f"{line.name}: groups or salts without a tenant", "with a tenant")
    for scope in ("admin", "steer", "loads", "replicas") if line.tenant is not None else ():
        if scope in line.scopes:
            reason = f"{line.name}: {scope} reaches every tenant, tenant is {line.tenant!r}"
            raise ConfigError(KEY, reason, "one of the two")
    digest = (
        sha256(line.token.encode()).digest()
        if line.token is not None
        else bytes.fromhex(line.token_sha256 or "")
    )
    caller = Caller(
        line.name,
        frozenset(line.scopes),
        line.tenant,
        frozenset(line.routing_groups or (ANY,)),
        frozenset(line.cache_salts or (line.tenant or ANY,)),
        line.max_strict_priority,
    )
    rates = (line.requests_per_s, line.burst_requests)
    return Token(digest, caller, *rates, _unix_s(line.expires))


def _unix_s(expires: datetime | None) -> float | None:
    """Return a Unix time; a time without a zone is in UTC."""
    if expires is None:
        return None
    zoned = expires if expires.tzinfo else expires.replace(tzinfo=UTC)
    return zoned.timestamp()


def _refuse_twice(what: str, values: Sequence[object]) -> None:
    if len(set(values)) < len(values):
        raise ConfigError(KEY, f"the {what} is given twice", f"each {what} once")
