"""What a booking, over HTTP and over NATS, and a KV event cost in Python: calls, files and rooms.

    python benchmarks/road_calls.py [--quick] [--json] [--list]

A router as `kv-router serve` builds it, in this process, with 16 workers; a thread books prompts
over HTTP, or with the Python client over NATS, and publishes the events of one engine. A profiler
lists the Python functions from the arrival of a request to the end of its reply, and from the
arrival of an event at its socket to the tree, without times. Kernels are machine code and are not
counted, nor are other packages. A room is a folder of `router/`; entering one that was left before
is a return. The core's part of a booking begins with the command, when the prompt is read.
"""

import argparse
import asyncio
import http.client
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from types import CodeType, FrameType

import msgspec
import zmq
from events_processes import free_port, running_server
from msgspec import Struct
from rows import Row, as_json, as_table, machine
from timing import Bounded

import router
from router.client import RouterClient, SelectRequest, UnansweredError
from router.config.load import load_router_config
from router.service.router import RouterService

WARM, REQUESTS, QUICK_REQUESTS = 64, 64, 16
WORKERS, TOKENS, BLOCK_SIZE, START_S, BETWEEN_EVENTS_S = 16, 512, 16, 60.0, 0.01
ROOT = Path(router.__file__).parent
PURE = frozenset({"core", "scheduler", "indexer", "sequence"})


class Road(Struct, frozen=True):
    """A way through the router: the functions that begin, identify and end it, and its goals.

    `mark`: a function that each walk calls. `end`: the function whose return ends it; empty: that
    which began it. `has_bus`: the router has one.
    """

    name: str
    begin: str
    mark: str
    end: str
    goals: dict[str, int]
    has_bus: bool = False


ROADS = (
    Road(
        "booking",
        "DirectProtocol.data_received",
        "Tracker.book",
        "",
        {"calls": 90, "of which in the core": 45, "files": 20, "returns to rooms": 3},
    ),
    Road(
        "KV event",
        "ZmqSource._receive_live",
        "RadixTree.apply",
        "RadixTree.apply",
        {"files": 20, "returns to rooms": 2},
    ),
    *(
        Road(
            f"NATS {verb}",
            "CarefulClient._process_msg",
            f"Verbs._{verb}",
            "",
            {"calls": goal},
            True,
        )
        for verb, goal in (("select_and_reserve", 60), ("prefill_complete", 40), ("free", 40))
    ),
)


class Walk(Struct, frozen=True):
    """The Python functions of one way, in order: file and name."""

    calls: list[tuple[str, str]]

    def figures(self) -> dict[str, int]:
        """Return one figure per goal."""
        rooms = [Path(file).parts[0] for file, _ in self.calls]
        entered = [
            room for before, room in zip(["", *rooms], rooms, strict=False) if room != before
        ]
        core = rooms[rooms.index("core") :]
        return {
            "calls": len(self.calls),
            "of which in the core": sum(room in PURE for room in core),
            "files": len({file for file, _ in self.calls}),
            "returns to rooms": len(entered) - len(set(entered)),
        }


class Profiler:
    """The walks of one road while it runs."""

    def __init__(self, road: Road) -> None:
        self.walks: list[Walk] = []
        self._road = road
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
        code, road = frame.f_code, self._road
        if event == "call":
            file = _file(code)
            if file and code.co_qualname == road.begin:
                self._entry, self._calls = frame, []
            if self._entry is not None and file:
                self._calls.append((file, code.co_qualname))
        elif event == "return" and self._entry is not None:
            is_end = frame is self._entry if not road.end else code.co_qualname == road.end
            if is_end:
                self._entry = None
                if any(name == road.mark for _, name in self._calls):
                    self.walks.append(Walk(self._calls))


def _file(code: CodeType) -> str:
    """Return the file of a function of the router; empty for others, and for kernels."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or path.name.startswith("_"):
        return ""
    return str(path.relative_to(ROOT))


def book_all(port: int, _: str, requests: int) -> None:
    """Register the workers, and book prompts that share a beginning, over one connection."""
    connection = _connected(port)
    _register_all(connection)
    for number, tokens in enumerate(_prompts(requests)):
        _post(connection, "/select_and_reserve", {"token_ids": tokens, "request_id": f"r{number}"})
        connection.request("DELETE", f"/reservations/r{number}")
        connection.getresponse().read()


def book_all_over_nats(port: int, nats_url: str, requests: int) -> None:
    """Register the workers, and book such prompts with the client."""
    _register_all(_connected(port))
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
    connection = _connected(port)
    with zmq.Context() as context, context.socket(zmq.XPUB) as engine:
        engine.linger = 0
        engine_port = engine.bind_to_random_port("tcp://127.0.0.1")
        _post(connection, "/workers", _registration(1, f"tcp://127.0.0.1:{engine_port}"))
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


def _register_all(connection: http.client.HTTPConnection) -> None:
    for worker_id in range(1, WORKERS + 1):
        _post(connection, "/workers", _registration(worker_id, f"tcp://127.0.0.1:{worker_id}"))


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


def _post(connection: http.client.HTTPConnection, path: str, body: object) -> None:
    headers = {"content-type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
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


LOADS = {
    "booking": book_all,
    "KV event": publish_all,
    **{road.name: book_all_over_nats for road in ROADS if road.has_bus},
}


async def profiled(road: Road, requests: int, nats_url: str) -> list[Walk]:
    """Return the walks of requests or events through a warm router."""
    port = free_port()
    command = ["--http-port", str(port), "--log-level", "error", "--nats-url", nats_url]
    service, stop = RouterService(load_router_config(command, {})), asyncio.Event()
    profiler = Profiler(road)
    running = asyncio.create_task(service.run(stop))
    try:
        with profiler.running():
            await asyncio.to_thread(LOADS[road.name], port, nats_url, WARM + requests)
    finally:
        stop.set()
        await running
    return profiler.walks[WARM:]


def walks_of(road: Road, requests: int) -> list[Walk]:
    """Return these walks, with a bus of their own if there is one."""
    with running_server() if road.has_bus else nullcontext() as server:
        return asyncio.run(profiled(road, requests, server.url if server else ""))


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests and events")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--list", action="store_true", help="print the functions of one of each")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for road in ROADS:
        walks = walks_of(road, QUICK_REQUESTS if arguments.quick else REQUESTS)
        rows += rows_of(road, walks)
        if arguments.list:
            print("\n".join(f"{file:<45}{name}" for file, name in walks[-1].calls), "\n")
    print(as_json(rows) if arguments.json else f"{machine()}\n{as_table(rows, 'goal')}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
