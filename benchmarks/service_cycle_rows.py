"""Rows of cycles: by raw sockets, as our client asks, and by `httpx`."""

import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median

import httpx
import msgspec
from events_processes import running_server
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
from service_load import HEAD_END, Load
from service_rows import GOAL_CONCURRENCY, Servers, ServiceScale
from service_servers import ServerProcess, our_server
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


def cycle_rows(servers: Servers, scale: ServiceScale) -> list[Row]:
    """Booking, first token and end, as fast as each server goes, and one at a time."""
    rows: list[Row] = []
    for tokens, goals in GOALS.items():
        cycles = Cycles(servers.world, tokens)
        for concurrency in (1, 16, 64):
            rows += _rate_rows(servers, scale, cycles, concurrency, goals.get(concurrency, 0.0))
        goal = goals[GOAL_CONCURRENCY]
        rows += _rate_rows(servers, scale, cycles, GOAL_CONCURRENCY, goal, TWO_SEGMENTS)
    return rows


def _rate_rows(
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
