"""Which route needs which scope of a token: the one table, of every process.

A test holds it against the routes that there are. What is not in it needs `admin`: a route that
nobody thought of is closed.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct

from router.security.caller import TokenScope

BUS = "NATS"
"""What the table has for a method where NATS asks, and for a path the name of what is asked."""

OPEN: tuple[str, ...] = (
    "GET /health",
    "GET /ready",
    "GET /docs",
    "GET /docs/oauth2-redirect",
    "GET /openapi.json",
    "GET /",
    "GET /dashboard/files/{name}",
)
"""Probes, and what anybody can read in the source: the dashboard without what it shows."""

METRICS = ("GET /metrics",)

ROUTE = (
    "POST /select",
    "POST /select_and_reserve",
    "POST /reservations",
    "POST /select:batch",
    "POST /reservations:batch",
    "POST /reservations/{request_id}/prefill_complete",
    "POST /reservations/{request_id}/output_block",
    "DELETE /reservations/{request_id}",
    "POST /potential_loads",
    "POST /overlap_scores",
    "POST /dashboard/look",
    # of the index alone
    "POST /query",
    "POST /query_by_hash",
    # of an agent that is its engine, and of a process that forwards
    "GET /v1/models",
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /tokenize",
    # over NATS
    "NATS select",
    "NATS select_and_reserve",
    "NATS new",
    "NATS reserve",
    "NATS prefill_complete",
    "NATS output_block",
    "NATS free",
    "NATS mark_prefill",
    "NATS mark_free",
    "NATS potential_loads",
    "NATS overlap_scores",
    "NATS select:batch",
    "NATS reservations:batch",
    "NATS FindMatchesTokens",
    "NATS FindMatchesHashed",
)

ADMIN = (
    "GET /workers",
    "GET /workers/{worker_id}",
    "POST /workers",
    "PATCH /workers/{worker_id}",
    "DELETE /workers/{worker_id}",
    "GET /routers",
    "GET /config",
    "GET /busy_threshold",
    "POST /busy_threshold",
    "GET /loads",
    "GET /dashboard/stream",
    "GET /shadow",
    "GET /predictions",
    "GET /replica_sync/peers",
    "POST /replica_sync/register_peer",
    "POST /replica_sync/deregister_peer",
    "GET /dump",
    "GET /blocks/{sequence_hash}",
    # of the index alone
    "POST /register",
    "POST /unregister",
    "GET /peers",
    "POST /register_peer",
    "POST /deregister_peer",
    # of an agent that is its engine
    "POST /reset_prefix_cache",
    "GET /tiers",
    "POST /tiers/reset_pool",
    "POST /tiers/reset_blocks",
    "POST /tiers/reset_all",
    # over NATS
    "NATS tiers_status",
    "NATS tiers_reset_pool",
    "NATS tiers_reset_blocks",
    "NATS tiers_reset_all",
    "NATS loads",
    "NATS DumpTree",
)
"""What shows or changes the state of everybody, whoever's it is."""

ROUTE_SCOPES: Mapping[str, TokenScope | None] = MappingProxyType(
    dict.fromkeys(OPEN)
    | dict.fromkeys(METRICS, "metrics")
    | dict.fromkeys(ROUTE, "route")
    | dict.fromkeys(ADMIN, "admin")
)
"""By method and path, as the route is declared; None: none."""

_PARAMETERS = {"int": "[0-9]+", "path": ".+", "": "[^/]+"}
_PARAMETER = re.compile(r"\\\{\w+(?::(\w+))?\\\}")


class _Pattern(Struct, frozen=True):
    matches: re.Pattern[str]
    scope: TokenScope | None


class RouteScopes:
    """The table, to ask. A path without parameters is found at once."""

    __slots__ = ("_patterns", "_plain")

    def __init__(self, table: Mapping[str, TokenScope | None] = ROUTE_SCOPES) -> None:
        self._plain = {key: value for key, value in table.items() if "{" not in key}
        self._patterns = tuple(_patterns(table.items()))

    def needed(self, method: str, path: str) -> TokenScope | None:
        """What a request needs. HEAD is answered as GET is, where it is."""
        key = f"{'GET' if method == 'HEAD' else method} {path}"
        if key in self._plain:
            return self._plain[key]
        for pattern in self._patterns:
            if pattern.matches.fullmatch(key):
                return pattern.scope
        return "admin"


def _patterns(routes: Iterable[tuple[str, TokenScope | None]]) -> Iterable[_Pattern]:
    for key, scope in routes:
        if "{" in key:
            text = _PARAMETER.sub(lambda found: _PARAMETERS[found[1] or ""], re.escape(key))
            yield _Pattern(re.compile(text), scope)
