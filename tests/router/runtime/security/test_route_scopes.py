from pathlib import Path
from typing import get_args

import pytest

from router.api.http.index_api import INDEX_ROUTES
from router.api.http.routes import ROUTES
from router.dashboard.handlers import PAGE_ROUTES
from router.forward.app import ROUTES as FORWARD_ROUTES
from router.protocol.commands import Command
from router.protocol.index_service import HashedLookup, TokensLookup, TreeLookup
from router.runtime.security.route_scopes import OPEN, ROUTE_SCOPES, RouteScopes

AGENT = Path(__file__).parents[4] / "worker_agent"
SERVED_ANYWAY = {"GET /docs", "GET /openapi.json"}
OF_AGENTS = {
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /tokenize",
    "GET /v1/models",
    "POST /reset_prefix_cache",
    "GET /dump",
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /blocksets",
    "GET /tiers",
    "POST /tiers/reset_pool",
    "POST /tiers/reset_blocks",
    "POST /tiers/reset_all",
}
OF_AGENTS_OVER_NATS = {
    "NATS tiers_status",
    "NATS tiers_reset_pool",
    "NATS tiers_reset_blocks",
    "NATS tiers_reset_all",
}


def test_every_route_is_in_the_table_and_nothing_else():
    routes = {f"{route.method} {route.path}" for route in (*ROUTES, *PAGE_ROUTES, *INDEX_ROUTES)}
    commands = [each.__struct_config__.tag for each in get_args(Command)]
    questions = [each.name for each in (TokensLookup, HashedLookup, TreeLookup)]
    over_nats = {f"NATS {name}" for name in (*commands, *questions)}
    assert set(ROUTE_SCOPES) == (
        routes | over_nats | SERVED_ANYWAY | OF_AGENTS | OF_AGENTS_OVER_NATS | set(FORWARD_ROUTES)
    )


def test_agents_have_the_routes_that_are_listed_here():
    names = ("reference/server.py", "bridge/server.py", "operations/http.py")
    sources = [(AGENT / name).read_text() for name in names]
    for route in OF_AGENTS:
        assert any(f'"{route.split()[1]}", self.' in source for source in sources)
    assert sum(source.count('", self.') for source in sources) == len(OF_AGENTS) + 4


def test_open_routes_show_nothing_of_callers():
    page = {"GET /", "GET /dashboard/files/{name}"}
    assert set(OPEN) == SERVED_ANYWAY | {"GET /health", "GET /ready"} | page


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/reservations/a%2Fb/output_block", "route"),
        ("DELETE", "/reservations/x", "route"),
        ("GET", "/workers/12", "admin"),
        ("GET", "/workers/x", "admin"),
        ("HEAD", "/health", None),
        ("HEAD", "/metrics", "metrics"),
        ("POST", "/metrics", "admin"),
        ("GET", "/nothing", "admin"),
    ],
)
def test_routes_require_their_scope(method, path, scope):
    assert RouteScopes().needed(method, path) == scope
