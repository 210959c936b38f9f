"""Which token opens what: tables for SECURITY.md."""

from router.runtime.security.route_scopes import BUS, ROUTE_SCOPES

SCOPES = (
    (None, "nothing: probes and documentation"),
    ("metrics", "scope `metrics`: numbers only"),
    (
        "route",
        "scope `route`: decide, book and complete requests, within the tenant's routing groups, salts and ids",
    ),
    ("loads", "scope `loads`: what a forwarder needs besides `route`; `admin` includes it"),
    (
        "replicas",
        "scope `replicas`: routers that share bookings without a bus (`router_peers_token_file`)",
    ),
    ("admin", "scope `admin`: everything that shows or changes the state of all tenants"),
)


def routes() -> str:
    """HTTP routes and NATS methods, by the scope that they need."""
    rows = ["| with a token file, a caller that presents | may use |\n|---|---|\n"]
    for scope, words in SCOPES:
        keys = [key for key, needed in ROUTE_SCOPES.items() if needed == scope]
        told = ", ".join(f"`{key}`" for key in keys if not key.startswith(BUS))
        bus = ", ".join(f"`{key.removeprefix(f'{BUS} ')}`" for key in keys if key.startswith(BUS))
        rows.append(f"| {words} | {told}{f'; over {BUS}: {bus}' if bus else ''} |\n")
    return "".join(rows)
