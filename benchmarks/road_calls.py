"""What a booking, its progress and a KV event cost in Python: calls, files and rooms.

    python benchmarks/road_calls.py [--quick] [--json] [--list]

A router as `kv-router serve` builds it, in this process, with 16 workers; a thread books prompts
over HTTP, and with the Python client over NATS, reports their first token and frees them, and
publishes the events of one engine. A profiler lists the Python functions from the arrival of a
request to the end of its reply, and from the arrival of an event at its socket to the tree, without
times. Kernels are machine code and are not counted, nor are other packages. A room is a folder of
`router/`; entering one that was left before is a return. The core's part of a booking begins with
the command, when the prompt is read. The HTTP part is what is between the bytes of a socket and the
command, and between the reply and the bytes.
"""

import asyncio
import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from types import CodeType, FrameType

import msgspec
import zmq
from command_line import section_parser
from events_processes import free_port, running_server
from msgspec import Struct
from report import Benchmark, Section, report
from rows import Row
from timing import Bounded

import router
from router.client import RouterClient, SelectRequest, UnansweredError
from router.config.load import load_router_config
from router.service.router import RouterService

WARM, REQUESTS, QUICK_REQUESTS = 64, 64, 16
WORKERS, TOKENS, BLOCK_SIZE, START_S, BETWEEN_EVENTS_S = 16, 512, 16, 60.0, 0.01
ROOT = Path(router.__file__).parent
HTTP = ("api/http/", "runtime/http_server/", "runtime/security/")
PURE = frozenset({"core", "scheduler", "indexer", "sequence"})


class Road(Struct, frozen=True):
    """A way through the router. `mark`: a function on it alone. `goals`: of its figures."""

    name: str
    mark: str
    goals: dict[str, int]


class Roads(Struct, frozen=True):
    """Roads with a common beginning and end, and what sends requests or events along them.

    `begin`, `end`: functions. A walk ends when `end` returns; if that is empty, when `begin` does.
    `send_all`: called with the router's port, the bus, and the number of requests. `has_bus`: the
    router has one.
    """

    begin: str
    end: str
    send_all: Callable[[int, str, int], None]
    roads: tuple[Road, ...]
    has_bus: bool = False


class Walk(Struct, frozen=True):
    """The Python functions of one way, in order: file and name."""

    calls: list[tuple[str, str]]

    def figures(self) -> dict[str, int]:
        """Return one figure per goal."""
        rooms = [Path(file).parts[0] for file, _ in self.calls]
        entered = [
            room for before, room in zip(["", *rooms], rooms, strict=False) if room != before
        ]
        core = rooms[rooms.index("core") :] if "core" in rooms else []
        return {
            "calls": len(self.calls),
            "of which HTTP": sum(file.startswith(HTTP) for file, _ in self.calls),
            "of which in the core": sum(room in PURE for room in core),
            "files": len({file for file, _ in self.calls}),
            "returns to rooms": len(entered) - len(set(entered)),
        }


class Profiler:
    """The walks of some roads while it runs, by the name of the road."""

    def __init__(self, roads: Roads) -> None:
        self.walks: dict[str, list[Walk]] = {road.name: [] for road in roads.roads}
        self._roads = roads
        self._calls: list[tuple[str, str]] = []
        self._entry: FrameType | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profile this thread."""
        sys.setprofile(self._take)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _take(self, frame: FrameType, event: str, _: object) -> None:
        code, roads = frame.f_code, self._roads
        if event == "call":
            file = _file(code)
            if file and code.co_qualname == roads.begin:
                self._entry, self._calls = frame, []
            if self._entry is not None and file:
                self._calls.append((file, code.co_qualname))
        elif event == "return" and self._entry is not None:
            is_end = frame is self._entry if not roads.end else code.co_qualname == roads.end
            if is_end:
                self._entry, names = None, {name for _, name in self._calls}
                for road in roads.roads:
                    if road.mark in names:
                        self.walks[road.name].append(Walk(self._calls))


def _file(code: CodeType) -> str:
    """Return the file of a function of the router; empty for others, and for kernels."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or path.name.startswith("_"):
        return ""
    return str(path.relative_to(ROOT))


def book_all(port: int, _: str, requests: int) -> None:
    """Register the workers, book prompts that share a beginning, and end them. One connection."""
    with _workers(port) as connection:
        for number, tokens in enumerate(_prompts(requests)):
            booked = {"token_ids": tokens, "request_id": f"r{number}"}
            _request(connection, "POST", "/select_and_reserve", booked)
            _request(connection, "POST", f"/reservations/r{number}/prefill_complete")
            _request(connection, "DELETE", f"/reservations/r{number}")


def book_all_over_nats(port: int, nats_url: str, requests: int) -> None:
    """Register the workers, and book such prompts with the client."""
    with _workers(port):
        asyncio.run(_book_with_client(nats_url, requests))


async def _book_with_client(nats_url: str, requests: int) -> None:
    async with RouterClient.over_nats(nats_url) as client:
        await _until_answered(client)
        for number, tokens in enumerate(_prompts(requests)):
            request_id = f"r{number}"
            await client.select_and_reserve(SelectRequest(token_ids=tokens, request_id=request_id))
            await client.prefill_complete(request_id)
            await client.free(request_id)


async def _until_answered(client: RouterClient) -> None:
    """Wait until the router listens on the bus."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            await client.loads()
            return
        except UnansweredError:
            if time.monotonic() > deadline_s:
                raise


def publish_all(port: int, _: str, events: int) -> None:
    """Register one engine, and publish an event of a block in each of its batches."""
    with (
        closing(_connected(port)) as connection,
        zmq.Context() as context,
        context.socket(zmq.XPUB) as engine,
    ):
        engine.linger = 0
        engine_port = engine.bind_to_random_port("tcp://127.0.0.1")
        registration = _registration(1, f"tcp://127.0.0.1:{engine_port}")
        _request(connection, "POST", "/workers", registration)
        engine.recv()  # the router has subscribed
        for number in range(events):
            time.sleep(BETWEEN_EVENTS_S)  # one event at a time is what is counted
            tokens = list(range(BLOCK_SIZE * number, BLOCK_SIZE * (number + 1)))
            stored = ["BlockStored", [number + 1], None, tokens, BLOCK_SIZE, None]
            batch = msgspec.msgpack.encode([time.time(), [stored]])
            engine.send_multipart([b"", number.to_bytes(8, "big"), batch])
        time.sleep(1.0)


def _prompts(count: int) -> Iterator[list[int]]:
    """Prompts whose first halves are the same."""
    for number in range(count):
        yield [*range(TOKENS // 2), *range(1000 * number, 1000 * number + TOKENS // 2)]


@contextmanager
def _workers(port: int) -> Iterator[http.client.HTTPConnection]:
    """Register the workers, whose event sockets are open, and yield a connection to the router."""
    with closing(_connected(port)) as connection, zmq.Context() as context, ExitStack() as stack:
        engines = [stack.enter_context(context.socket(zmq.XPUB)) for _ in range(WORKERS)]
        for worker_id, engine in enumerate(engines, 1):
            engine.linger = 0
            engine_port = engine.bind_to_random_port("tcp://127.0.0.1")
            registration = _registration(worker_id, f"tcp://127.0.0.1:{engine_port}")
            _request(connection, "POST", "/workers", registration)
        for engine in engines:
            engine.recv()  # the router has subscribed
        yield connection


def _connected(port: int) -> http.client.HTTPConnection:
    """Return a connection, once the router listens."""
    deadline_s = time.monotonic() + START_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.connect()
            return connection
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _request(
    connection: http.client.HTTPConnection, method: str, path: str, body: object = None
) -> None:
    headers = {"content-type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    reply = connection.getresponse()
    text = reply.read()
    if reply.status >= 300:
        raise RuntimeError(f"{path}: {reply.status} {text!r}")


def _registration(worker_id: int, events_endpoint: str) -> dict[str, object]:
    """A worker whose engine, if there is one, publishes events."""
    return {
        "worker_id": worker_id,
        "endpoint": f"http://127.0.0.1:{worker_id}",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 8_192,
        "total_kv_blocks": 10_000,
        "kv_events_endpoints": {"0": events_endpoint},
    }


LIFE_CYCLE = Roads(
    "DirectProtocol.data_received",
    "",
    book_all,
    (
        Road(
            "booking",
            "Tracker.book",
            {
                "calls": 59,
                "of which HTTP": 15,
                "of which in the core": 45,
                "files": 20,
                "returns to rooms": 3,
            },
        ),
        Road("prefill_complete", "HotRoutes._prefill_complete", {"calls": 19, "of which HTTP": 12}),
        Road("free", "HotRoutes._free", {"calls": 22, "of which HTTP": 12}),
    ),
)
EVENT = Roads(
    "ZmqSource._receive_live",
    "RadixTree.apply",
    publish_all,
    (Road("KV event", "RadixTree.apply", {"files": 20, "returns to rooms": 2}),),
)


NATS_LIFE_CYCLE = Roads(
    "CarefulClient._process_msg",
    "",
    book_all_over_nats,
    tuple(
        Road(f"NATS {verb}", f"Verbs._{verb}", {"calls": goal})
        for verb, goal in (("select_and_reserve", 60), ("prefill_complete", 40), ("free", 40))
    ),
    has_bus=True,
)


async def profiled(roads: Roads, requests: int, nats_url: str = "") -> dict[str, list[Walk]]:
    """Return the walks of requests or events through a warm router, by the name of the road."""
    port = free_port()
    command = ["--http-port", str(port), "--log-level", "error", "--nats-url", nats_url]
    service, stop = RouterService(load_router_config(command, {})), asyncio.Event()
    profiler = Profiler(roads)
    running = asyncio.create_task(service.run(stop))
    try:
        with profiler.running():
            await asyncio.to_thread(roads.send_all, port, nats_url, WARM + requests)
    finally:
        stop.set()
        await running
    return {name: walks[WARM:] for name, walks in profiler.walks.items()}


def walks_of(roads: Roads, requests: int) -> dict[str, list[Walk]]:
    """Return these walks, with a bus of their own if there is one."""
    with running_server() if roads.has_bus else nullcontext() as server:
        return asyncio.run(profiled(roads, requests, server.url if server else ""))


def rows_of(road: Road, walks: list[Walk]) -> list[Row]:
    """Return a row per goal: the median walk beside the goal."""
    figures = [each.figures() for each in walks]
    return [
        Bounded(
            f"{road.name}: {name}",
            median(each[name] for each in figures),
            goal,
            "",
            goal,
            lower=True,
        )
        for name, goal in road.goals.items()
    ]


def rows_of_all(roads: Roads, requests: int, *, is_listed: bool) -> list[Row]:
    """Return the rows of these roads. `is_listed`: print the functions of one walk of each."""
    found, rows = walks_of(roads, requests), []
    for road in roads.roads:
        walks = found[road.name]
        rows += rows_of(road, walks)
        if is_listed:
            print("\n".join(f"{file:<45}{name}" for file, name in walks[-1].calls), "\n")
    return rows


SECTIONS: dict[str, tuple[str, Roads]] = {
    "http": ("the life of a booking over HTTP", LIFE_CYCLE),
    "event": ("an event, from an engine's socket to the tree", EVENT),
    "nats": ("the life of a booking over NATS", NATS_LIFE_CYCLE),
}


def main() -> int:
    parser = section_parser(__doc__, SECTIONS)
    parser.add_argument("--list", action="store_true", help="print the functions of one of each")
    arguments = parser.parse_args()
    requests = QUICK_REQUESTS if arguments.quick else REQUESTS
    chosen = {
        name: Section(title, partial(rows_of_all, roads, requests, is_listed=arguments.list))
        for name, (title, roads) in SECTIONS.items()
        if name in arguments.only
    }
    scale = f"medians of {requests} requests or events each"
    return report(chosen, Benchmark("road-calls", "goal", scale), arguments)


if __name__ == "__main__":
    sys.exit(main())
