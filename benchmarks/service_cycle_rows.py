"""Rows of cycles: by raw sockets, as our client asks, and by `httpx`."""

import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import httpx
import msgspec
from rows import Row
from service_cycle import CALLS, PLAIN, Cycle, Cycles, Form, cycled, expect_no_bookings, wrong
from service_load import Load
from service_rows import GOAL_CONCURRENCY, Servers, ServiceScale
from service_servers import ServerProcess
from timing import Quicker, alternate

CYCLES = {512: 6_000, 8_192: 2_400, 100_000: 240}
ALONE_CYCLES = {512: 3_000, 8_192: 1_200, 100_000: 120}
GOALS = {512: {16: 0.8, 64: 0.8}, 8_192: {16: 3.0}, 100_000: {16: 3.5}}
ALONE_GOAL = 1 / 1.15
"""How many times as long the peer has to take for each call of 512 tokens, at least."""

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
            return cycled(server, made[round_number], concurrency)

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
