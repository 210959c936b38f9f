from pathlib import Path

import pytest

from router.http.index_openapi import INDEX_ROUTES
from router.http.openapi import ROUTES
from router.security.route_scopes import OPEN, ROUTE_SCOPES, RouteScopes

AGENT = Path(__file__).parents[3] / "worker_agent"
SERVED_ANYWAY = {"GET /docs", "GET /docs/oauth2-redirect", "GET /openapi.json"}
OF_AGENTS = {
    "POST /v1/completions",
    "GET /v1/models",
    "POST /reset_prefix_cache",
    "GET /dump",
    "GET /health",
    "GET /ready",
    "GET /metrics",
}


def test_every_route_is_in_the_table_and_nothing_else():
    routes = {f"{route.method} {route.path}" for route in (*ROUTES, *INDEX_ROUTES)}
    assert set(ROUTE_SCOPES) == routes | SERVED_ANYWAY | OF_AGENTS


def test_agents_have_the_routes_that_are_listed_here():
    sources = [(AGENT / name).read_text() for name in ("server.py", "bridge_server.py")]
    for route in OF_AGENTS:
        assert any(f'"{route.split()[1]}", self.' in source for source in sources)
    assert sum(source.count('", self.') for source in sources) == len(OF_AGENTS) + 4


def test_what_is_open_tells_nothing_of_anybody():
    assert set(OPEN) == SERVED_ANYWAY | {"GET /health", "GET /ready"}


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
def test_what_a_request_needs(method, path, scope):
    assert RouteScopes().needed(method, path) == scope
