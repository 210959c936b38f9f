"""What callers and operators add to a cycle, each beside our own plain cycle.

Some are fields of a request, others settings of a router of its own on the same core. All figures
are processor time: a second router, a bus or a collector needs the other core.
"""

import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from events_processes import free_port, running_server
from msgspec import Struct
from rows import Row
from service_cycle import PLAIN, Cycles, Form, cycled
from service_load import Load
from service_rows import GOAL_CONCURRENCY, Servers, ServiceScale
from service_servers import Access, ServerProcess, our_server
from service_world import TAINTS, WORKERS, World
from timing import Quicker, alternate

from router.scheduler.policy.registry import builtin_policies
from router.scheduler.settings import DEFAULT_POLICY

TOKENS, CYCLES = 512, 5_000
GOAL, LOGGED_GOAL, TLS_GOAL = 0.85, 0.7, 0.5
SESSIONS, TENANTS, SALTS = 1_000, 50, 200
TOKEN, TENANT_TOKEN = "operator-of-the-benchmark", "tenant-of-the-benchmark"
TOKENS_TOML = f"""
[[tokens]]
name = "operator"
token = "{TOKEN}"
scopes = ["route", "admin", "metrics", "loads"]

[[tokens]]
name = "tenant"
token = "{TENANT_TOKEN}"
scopes = ["route"]
tenant = "acme"
cache_salts = ["*"]
"""


class Feature(Struct, frozen=True):
    """How a cycle with it is asked for, and how much of the plain one's rate it has to reach."""

    form: Form
    goal: float = GOAL


def field(**values: Any) -> Feature:
    """Fields of the booking; a function is asked for each number."""

    def fields(number: int) -> Mapping[str, Any]:
        return {name: value(number) if callable(value) else value for name, value in values.items()}

    return Feature(Form(fields=fields, is_salted="cache_salt" in values))


def header(name: str, value: Callable[[int], str], goal: float = GOAL) -> Feature:
    """A header of each call."""
    return Feature(Form(headers=lambda number: {name: value(number)}), goal)


def allowed(number: int) -> list[int]:
    """Half of the workers."""
    return [1 + (number + step) % WORKERS for step in range(WORKERS // 2)]


def trace_of(number: int, *, is_sampled: bool) -> str:
    """A traceparent of its own."""
    return f"00-{number + 1:032x}-{number + 1:016x}-{'01' if is_sampled else '00'}"


def bearer(token: str) -> Callable[[int], str]:
    """The value of the header."""
    return lambda _: f"Bearer {token}"


REQUESTS: dict[str, Feature] = {
    "tenant": field(tenant=lambda number: f"tenant-{number % TENANTS}"),
    "expected_output_tokens and priority": field(
        expected_output_tokens=lambda number: 50 + number % 900,
        priority_jump=lambda number: number % 7 / 2,
        strict_priority=lambda number: number % 3,
    ),
    "salts": field(cache_salt=lambda number: f"salt-{number % SALTS}"),
    "allowed workers": field(allowed_worker_ids=allowed),
    "preferred taints": field(
        routing_constraints=lambda number: {"preferred_taints": {TAINTS[number % len(TAINTS)]: 0.5}}
    ),
    "temperature": field(router_config_override={"router_temperature": 0.5}),
    "traceparent": header(
        "traceparent", lambda number: trace_of(number, is_sampled=number % 100 == 0)
    ),
} | {
    f"policy {each.name}": field(router_config_override={"policy": each.name})
    for each in builtin_policies()
    if each.name != DEFAULT_POLICY
}
"""Asked of the plain router itself."""


class Setting(Struct, frozen=True):
    """A router of its own. `served`: starts it, in a folder that may be written to."""

    served: Callable[[World, Path], Any]
    features: dict[str, Feature]


Served: TypeAlias = Iterator[list[ServerProcess]]


def with_settings(*settings: str, access: Access = Access()) -> Any:  # noqa: B008 - frozen
    """Start a router with further settings, in which {folder} is the folder."""

    @contextmanager
    def served(world: World, folder: Path) -> Served:
        given = [each.format(folder=folder) for each in settings]
        with our_server(*given, access=access) as server:
            world.register(server)
            yield [server]

    return served


@contextmanager
def with_tokens(world: World, folder: Path) -> Served:
    """Start a router that asks for tokens."""
    (folder / "tokens.toml").write_text(TOKENS_TOML)
    access = Access({"authorization": f"Bearer {TOKEN}"})
    with our_server("--token-file", str(folder / "tokens.toml"), access=access) as server:
        world.register(server)
        yield [server]


@contextmanager
def with_tls(world: World, folder: Path) -> Served:
    """Start a router that is asked over TLS."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.processes.certificates import Authority

    authority = Authority(folder)
    certificate, key = authority.issue("router")
    access = Access(authorities=str(authority.path))
    settings = ("--tls-cert-file", certificate, "--tls-key-file", key)
    with our_server(*settings, access=access) as server:
        world.register(server)
        yield [server]


@contextmanager
def with_collector(world: World, _: Path) -> Served:
    """Start a router that exports traces."""
    with collecting() as url, our_server("--otlp-endpoint", url) as server:
        world.register(server)
        yield [server]


class Sink(BaseHTTPRequestHandler):
    """Takes whatever is posted."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def sink(port: int) -> None:
    """Serve forever."""
    HTTPServer(("127.0.0.1", port), Sink).serve_forever()


@contextmanager
def collecting() -> Iterator[str]:
    """A collector of traces that keeps none, in a process of its own; its URL."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=sink, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port}/v1/traces"
    finally:
        process.terminate()
        process.join()


@contextmanager
def in_fleet(world: World, _: Path) -> Served:
    """Start two routers on one bus, as the chart has them, which share their bookings."""
    with ExitStack() as stack:
        nats = stack.enter_context(running_server())
        routers = [
            stack.enter_context(our_server("--nats-url", nats.url, "--name", name))
            for name in ("one", "two")
        ]
        for each in routers:
            world.register(each)
        yield routers


SETTINGS = [
    Setting(
        with_tokens,
        {
            "bearer token": header("authorization", bearer(TOKEN)),
            "a tenant's token": header("authorization", bearer(TENANT_TOKEN)),
        },
    ),
    Setting(
        with_settings("--session-affinity-ttl-s", "600"),
        {"session_id": field(session_id=lambda number: f"session-{number % SESSIONS}")},
    ),
    Setting(
        with_settings(
            "--active-decode-blocks-threshold=0.9", "--active-prefill-tokens-threshold-frac=100"
        ),
        {"busy thresholds": Feature(PLAIN)},
    ),
    Setting(with_settings("--router-queue-threshold=100"), {"queueing on": Feature(PLAIN)}),
    Setting(in_fleet, {"two routers, each asked": Feature(PLAIN)}),
    Setting(
        with_settings("--decision-log={folder}/decisions.jsonl"),
        {"decision log": Feature(PLAIN, LOGGED_GOAL)},
    ),
    Setting(
        with_collector,
        {
            "traces exported, of every 100th": header(
                "traceparent",
                lambda number: trace_of(number, is_sampled=number % 100 == 0),
                LOGGED_GOAL,
            ),
            "traces exported, of all": header(
                "traceparent", lambda number: trace_of(number, is_sampled=True), LOGGED_GOAL
            ),
        },
    ),
    Setting(with_tls, {"TLS": Feature(PLAIN, TLS_GOAL)}),
]


def feature_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """Each beside the plain cycle of the same rounds."""
    cycles = Cycles(servers.world, TOKENS)
    rows = _rows([servers.ours], servers.ours, REQUESTS, cycles, scale)
    for setting in SETTINGS:
        with (
            tempfile.TemporaryDirectory() as folder,
            setting.served(servers.world, Path(folder)) as routers,
        ):
            rows += _rows(routers, servers.ours, setting.features, cycles, scale)
    return rows


def _rows(
    routers: list[ServerProcess],
    plain: ServerProcess,
    features: Mapping[str, Feature],
    cycles: Cycles,
    scale: ServiceScale,
) -> list[Row]:
    count = scale.count(CYCLES)

    def side(asked: list[ServerProcess], form: Form) -> Callable[[int], Load]:
        concurrency = GOAL_CONCURRENCY // len(asked)
        return lambda _: cycled(asked, cycles.made(count, form), concurrency)

    sides = [side([plain], PLAIN), *(side(routers, each.form) for each in features.values())]
    base, *loads = alternate(sides, scale.rounds, warm_up=True)
    rows: list[Row] = []
    for (name, feature), load in zip(features.items(), loads, strict=True):
        times = [1e6 * median(each.processor_s_each for each in side) for side in (load, base)]
        rows.append(Quicker(f"{name}, of a core", *times, "µs", feature.goal, lower=False))
    return rows
