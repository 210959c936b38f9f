"""The token scope of each route: one table for all processes.

A test compares it with the existing routes. A route that is not in it needs `admin`, so a forgotten
route is closed.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct

from router.runtime.security.caller import TokenScope

BUS = "NATS"
"""The method of NATS requests in the table; their path is the name of the request."""

OPEN: tuple[str, ...] = (
    "GET /health",
    "GET /ready",
    "GET /docs",
    "GET /openapi.json",
    "GET /",
    "GET /dashboard/files/{name}",
)
"""Probes, and public content: the dashboard's files, without its data."""

PROBES = frozenset(("/health", "/ready"))
"""Open routes that are served at any rate: a refused probe would end or detach a sound process.

Their responses cost O(1).
"""

METRICS = ("GET /metrics", "GET /capacity", "NATS capacity")

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
    # Routes of the indexer only.
    "POST /query",
    "POST /query_by_hash",
    # Routes of an agent that embeds its engine, and of a forwarding process.
    "GET /v1/models",
    "GET /v1/models/{model:path}",
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "GET /v1/responses/{request_id}",
    "DELETE /v1/responses/{request_id}",
    "POST /v1/responses/{request_id}/cancel",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/embeddings",
    "POST /v2/embed",
    "POST /pooling",
    "POST /classify",
    "POST /v1/classify",
    "POST /rerank",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /score",
    "POST /v1/score",
    "POST /v1/audio/transcriptions",
    "POST /v1/audio/translations",
    "POST /tokenize",
    "POST /detokenize",
    # NATS requests.
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

LOADS = ("GET /loads", "NATS loads")
"""What a forwarder needs besides `route`."""

REPLICAS = ("POST /replica_sync/stream",)
"""What a router needs of another without a bus: its reservations, of all callers."""

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
    "GET /dashboard/stream",
    "GET /dashboard/decisions",
    "GET /recording",
    "POST /recording",
    "GET /shadow",
    "GET /predictions",
    "GET /replica_sync/peers",
    "POST /replica_sync/register_peer",
    "POST /replica_sync/deregister_peer",
    "GET /dump",
    "GET /blocks/{sequence_hash}",
    # Routes of the indexer only.
    "POST /register",
    "POST /unregister",
    "GET /peers",
    "POST /register_peer",
    "POST /deregister_peer",
    # Routes of an agent that embeds its engine.
    "POST /reset_prefix_cache",
    "GET /blocksets",
    "GET /tiers",
    "POST /tiers/reset_pool",
    "POST /tiers/reset_blocks",
    "POST /tiers/reset_all",
    # NATS requests.
    "NATS tiers_status",
    "NATS tiers_reset_pool",
    "NATS tiers_reset_blocks",
    "NATS tiers_reset_all",
    "NATS DumpTree",
)
"""Routes that show or change state of all tenants."""

ROUTE_SCOPES: Mapping[str, TokenScope | None] = MappingProxyType(
    dict.fromkeys(OPEN)
    | dict.fromkeys(METRICS, "metrics")
    | dict.fromkeys(ROUTE, "route")
    | dict.fromkeys(LOADS, "loads")
    | dict.fromkeys(REPLICAS, "replicas")
    | dict.fromkeys(ADMIN, "admin")
)
"""Scopes by method and declared path; None: no token is needed."""

_PARAMETERS = {"int": "[0-9]+", "path": ".+", "": "[^/]+"}
_PARAMETER = re.compile(r"\\\{\w+(?::(\w+))?\\\}")


class _Pattern(Struct, frozen=True):
    matches: re.Pattern[str]
    scope: TokenScope | None


class RouteScopes:
    """Lookup in the table. A path without parameters is found in O(1)."""

    __slots__ = ("_patterns", "_plain")

    def __init__(self, table: Mapping[str, TokenScope | None] = ROUTE_SCOPES) -> None:
        self._plain = {key: value for key, value in table.items() if "{" not in key}
        self._patterns = tuple(_patterns(table.items()))

    def needed(self, method: str, path: str) -> TokenScope | None:
        """Return the scope that a request needs. HEAD needs the scope of GET."""
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
