"""Rows of the comparison of two services: cycles, and choices alone."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from statistics import median
from typing import Self

import httpx
import msgspec
from events_processes import pin, running_server
from msgspec import structs
from rows import Row
from service_cycle import (
    BUS_CODECS,
    CALLS,
    PLAIN,
    BusCodec,
    Cycle,
    Cycles,
    Form,
    body_of,
    compare,
    cycled,
    cycled_by_client,
    cycled_over_nats,
)
from service_load import HEAD_END, Load, percentile, repeated, request, run_load
from service_servers import GENERATOR_CORE, ServerProcess, our_server, peer_server
from service_world import MODEL, WORKERS, Tokens, World, running_world
from timing import Quicker, alternate

CYCLES = {512: 12_000, 8_192: 3_000, 100_000: 240}
ALONE_CYCLES = {512: 3_000, 8_192: 1_200, 100_000: 120}
GOALS = {512: {16: 0.8, 64: 0.8}, 8_192: {16: 3.0}, 100_000: {16: 3.5}}
ALONE_GOAL = 1 / 1.15
"""How many times as long the peer has to take for each call of 512 tokens, at least."""

CLIENT_CYCLES, CLIENT_CONCURRENCY, CLIENT_GOAL = 20_000, 64, 1.3
HTTPX_CYCLES, HTTPX_GOAL, HTTPX_PROCESSOR_GOAL = 1_200, 0.95, 1 / 1.25
NATS_GOAL = 2.0

TWO_SEGMENTS = Form(shape="two segments")

JSON_GOALS = {512: 0.9, 8_192: 2.0, 100_000: 2.5}
BINARY_GOALS = {512: 1.1, 8_192: 5.0, 100_000: 10.0}
ALONE_GOALS = {512: 1 / 1.2, 8_192: 1.0, 100_000: 1.0}
"""How many times as long the peer has to take, at least."""

REQUESTS = {512: 20_000, 8_192: 4_000, 100_000: 400}
ALONE_REQUESTS = {512: 4_000, 8_192: 2_000, 100_000: 300}
CONCURRENCIES = (1, 16, 64)
GOAL_CONCURRENCY = 16
QUERY = "model_name=m&routing_group=g"


class ServiceScale:
    """How much is measured: all of it, or what ends within 45 s."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 5
        self.share = 0.05 if quick else 1.0
        self.concurrencies = (GOAL_CONCURRENCY,) if quick else CONCURRENCIES
        self.is_quick = quick

    def count(self, requests: int) -> int:
        return max(20, int(requests * self.share))

    def __str__(self) -> str:
        return f"medians of {self.rounds} interleaved rounds{', short' if self.is_quick else ''}"


class Servers:
    """Both, each started when first asked for, and the engines that tell them what they hold."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._workers = workers
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        pin(GENERATOR_CORE)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def world(self) -> World:
        return self._stack.enter_context(running_world(self._workers))

    @cached_property
    def ours(self) -> ServerProcess:
        return self._started(our_server())

    @cached_property
    def peer(self) -> ServerProcess:
        return self._started(peer_server())

    def _started(self, server: AbstractContextManager[ServerProcess]) -> ServerProcess:
        started = self._stack.enter_context(server)
        self.world.register(started)
        return started

    def json(self, tokens: int) -> list[bytes]:
        """A request for each prompt of that length."""
        return [_json_request(prompt) for prompt in self.world.prompts[tokens]]

    def binary(self, tokens: int) -> list[bytes]:
        """The same with packed tokens."""
        return [_binary_request(prompt) for prompt in self.world.prompts[tokens]]


def cycle_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """Booking, first token and end, as fast as each server goes, and one at a time."""
    rows: list[Row] = []
    for tokens, goals in GOALS.items():
        cycles = Cycles(servers.world, tokens)
        for concurrency in CONCURRENCIES:
            goal = goals.get(concurrency, 0.0)
            rows += _cycle_rate_rows(servers, scale, cycles, concurrency, goal)
        goal = goals[GOAL_CONCURRENCY]
        rows += _cycle_rate_rows(servers, scale, cycles, GOAL_CONCURRENCY, goal, TWO_SEGMENTS)
    return rows


def _cycle_rate_rows(
    servers: Servers,
    scale: ServiceScale,
    cycles: Cycles,
    concurrency: int,
    goal: float,
    form: Form = PLAIN,
) -> list[Row]:
    is_alone = concurrency == 1
    count = scale.count((ALONE_CYCLES if is_alone else CYCLES)[cycles.tokens])
    loads = cycle_loads((servers.ours, servers.peer), cycles, count, concurrency, scale, form)
    name = f"{cycles.tokens}, {concurrency} at once"
    if form.shape != PLAIN.shape:
        name += f", {form.shape}"
    rows = [rate_row(name, loads, goal), processor_row(f"{name}, of a core", loads, goal)]
    if is_alone:
        goal = ALONE_GOAL if cycles.tokens == 512 else 0.0
        rows += [p50_row(f"{cycles.tokens}, p50 of {CALLS[n]}", loads, n, goal) for n in range(3)]
    return rows


def client_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """As our client asks, beside the peer's three calls."""
    cycles, count = Cycles(servers.world, 512), scale.count(CLIENT_CYCLES)

    def ours(_: int) -> Load:
        made = cycles.booked_by_client(count)
        return cycled_by_client(servers.ours, made, CLIENT_CONCURRENCY)

    def peer(_: int) -> Load:
        return cycled((servers.peer,), cycles.made(count), CLIENT_CONCURRENCY)

    loads = alternate([ours, peer], scale.rounds, warm_up=True)
    name = f"512, {CLIENT_CONCURRENCY} at once, by our client"
    return [
        rate_row(name, loads, CLIENT_GOAL),
        processor_row(f"{name}, of a core", loads, CLIENT_GOAL),
    ]


def httpx_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """As an ordinary user of `httpx` asks: the client is what takes the time."""
    cycles, count = Cycles(servers.world, 512), scale.count(HTTPX_CYCLES)
    sides = [_by_httpx(server, cycles, count) for server in (servers.ours, servers.peer)]
    loads = alternate(sides, scale.rounds, warm_up=True)
    name = f"512, {GOAL_CONCURRENCY} at once, by httpx"
    return [
        rate_row(name, loads, HTTPX_GOAL),
        processor_row(f"{name}, of a core", loads, HTTPX_PROCESSOR_GOAL),
    ]


def nats_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """Over the bus, beside the same router asked over HTTP: processor time of the router alone."""
    cycles, count = Cycles(servers.world, 512), scale.count(CYCLES[512])
    with running_server() as nats, our_server("--nats-url", nats.url) as router:
        servers.world.register(router)
        port = int(nats.url.rsplit(":", 1)[1])

        def over_http(_: int) -> Load:
            return cycled((router,), cycles.made(count), GOAL_CONCURRENCY)

        def over_nats(codec: BusCodec) -> Callable[[int], Load]:
            def measure(_: int) -> Load:
                made = cycles.booked_over_nats(count, codec)
                return cycled_over_nats(router, port, made, GOAL_CONCURRENCY, codec)

            return measure

        sides = [over_http, *map(over_nats, BUS_CODECS.values())]
        base, *loads = alternate(sides, scale.rounds, warm_up=True)
    rows: list[Row] = []
    for name, load in zip(BUS_CODECS, loads, strict=True):
        times = [1e6 * median(each.processor_s_each for each in side) for side in (load, base)]
        title = f"512, {GOAL_CONCURRENCY} at once over NATS, {name}, of a core"
        rows.append(Row(title, *times, "µs", NATS_GOAL, lower=True))
    return rows


def _by_httpx(server: ServerProcess, cycles: Cycles, count: int) -> Callable[[int], Load]:
    def measure(_: int) -> Load:
        made = cycles.made(count)
        before_s = server.processor_s
        load = asyncio.run(_all_by_httpx(server.url, made))
        load = structs.replace(load, processor_s=server.processor_s - before_s)
        compare((server,), made, load)
        return load

    return measure


async def _all_by_httpx(url: str, cycles: Sequence[Cycle]) -> Load:
    """Bodies as an ordinary user has them, in Python's own types, are made before the clock."""
    bodies = [msgspec.json.decode(body_of(each.script[0][0])) for each in cycles]
    waiting = list(enumerate(bodies))[::-1]
    kept: list[tuple[int, bytes]] = []
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:

        async def caller() -> None:
            while waiting:
                number, body = waiting.pop()
                booked = await client.post("/select_and_reserve", json=body)
                kept.append((number, HEAD_END + booked.raise_for_status().content))
                path = f"/reservations/{booked.json()['selection_id']}"
                (await client.post(f"{path}/prefill_complete")).raise_for_status()
                (await client.delete(path)).raise_for_status()

        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as callers:
            for _ in range(GOAL_CONCURRENCY):
                callers.create_task(caller())
        seconds = time.perf_counter() - start_s
    return Load(seconds=seconds, latencies_s=[[seconds] * len(kept)], kept=kept)


def cycle_loads(
    sides: Sequence[ServerProcess],
    cycles: Cycles,
    count: int,
    concurrency: int,
    scale: ServiceScale,
    form: Form = PLAIN,
) -> list[list[Load]]:
    """Rounds of the same cycles at each of the servers."""
    made: dict[int, list[Cycle]] = {}

    def side(server: ServerProcess) -> Callable[[int], Load]:
        def measure(round_number: int) -> Load:
            if round_number not in made:
                made.clear()
                made[round_number] = cycles.made(count, form)
            return cycled((server,), made[round_number], concurrency)

        return measure

    return alternate([side(server) for server in sides], scale.rounds, warm_up=True)


def rate_row(name: str, loads: Sequence[Sequence[Load]], goal: float) -> Row:
    """Cycles a second, of each side."""
    rates = [median(load.per_s for load in side) for side in loads]
    return Row(name, *rates, "1/s", goal, lower=False)


def processor_row(name: str, loads: Sequence[Sequence[Load]], goal: float) -> Row:
    """What each cycle took of the server's core: on a busy machine the better figure."""
    times = [1e6 * median(load.processor_s_each for load in side) for side in loads]
    return Quicker(name, *times, "µs", goal, lower=False)


def p50_row(name: str, loads: Sequence[Sequence[Load]], step: int, goal: float) -> Row:
    """One call's time, of each side."""
    times = [1e6 * median(load.p50_s(step) for load in side) for side in loads]
    return Quicker(name, *times, "µs", goal, lower=False)


def json_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    return _select_rate_rows(servers, scale, servers.json, JSON_GOALS)


def binary_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    return _select_rate_rows(servers, scale, servers.binary, BINARY_GOALS)


def alone_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    rows: list[Row] = []
    for tokens, goal in ALONE_GOALS.items():
        requests, count = servers.json(tokens), scale.count(ALONE_REQUESTS[tokens])
        ours, peer = _loads(servers, (requests, requests), 1, count, scale.rounds)
        for label, figure in (("p50", 0.5), ("p99", 0.99)):
            times = [
                1e6 * median(percentile(load.latencies_s[0], figure) for load in side)
                for side in (ours, peer)
            ]
            least = goal if figure > 0.5 else 0.0
            rows.append(Quicker(f"{tokens}, {label}", *times, "µs", least, lower=False))
    return rows


def _select_rate_rows(
    servers: Servers,
    scale: ServiceScale,
    requests_of: Callable[[int], list[bytes]],
    goals: dict[int, float],
) -> list[Row]:
    rows = []
    for tokens, goal in goals.items():
        sides = (requests_of(tokens), servers.json(tokens))
        count = scale.count(REQUESTS[tokens])
        for concurrency in scale.concurrencies:
            loads = _loads(servers, sides, concurrency, count, scale.rounds)
            least = goal if concurrency == GOAL_CONCURRENCY else 0.0
            name = f"{tokens}, {concurrency} at once"
            rows.append(rate_row(name, loads, least))
            if concurrency == GOAL_CONCURRENCY:
                rows.append(processor_row(f"{tokens}, of a core's time", loads, goal))
    return rows


def _loads(
    servers: Servers,
    requests: tuple[Sequence[bytes], Sequence[bytes]],
    concurrency: int,
    count: int,
    rounds: int,
) -> list[list[Load]]:
    pairs = zip((servers.ours, servers.peer), requests, strict=True)
    sides = [_side(server, asked, concurrency, count) for server, asked in pairs]
    return alternate(sides, rounds, warm_up=True)


def _side(
    server: ServerProcess, requests: Sequence[bytes], concurrency: int, count: int
) -> Callable[[int], Load]:
    def measure(_: int) -> Load:
        before_s = server.processor_s
        load = _checked(run_load((server.address,), repeated(requests, count), concurrency))
        return structs.replace(load, processor_s=server.processor_s - before_s)

    return measure


def _checked(load: Load) -> Load:
    if load.refusals:
        raise RuntimeError(f"{len(load.refusals)} requests failed: {load.refusals[0].answer!r}")
    return load


def _json_request(prompt: Tokens) -> bytes:
    body = {"token_ids": prompt.tolist(), **MODEL}
    return request("/select", msgspec.json.encode(body), "application/json")


def _binary_request(prompt: Tokens) -> bytes:
    return request(f"/select?{QUERY}", prompt.astype("<u4").tobytes(), "application/octet-stream")
