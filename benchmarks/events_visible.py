"""How soon a block that an engine stored is visible in the index of another process.

From the call of `publisher.stored` to the moment when the message with its event is applied. All
workers live in one process, each with a publisher of its own, and store requests in turn at a
steady pace, removing what their full pools have no room for; both processes read CLOCK_MONOTONIC.

Beside it stands what the flush window alone makes them wait: evenly between nothing and all of it.
"""

import asyncio
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor
from statistics import median

import uvloop
from events_fleet import PacedFleet, Sent
from events_processes import READER_CORE, process_anywhere, process_on, running_server
from events_reader import Applied, CoreReader, TimedCore
from events_scale import EventScale
from msgspec import Struct
from rows import Row
from timing import Bounded

from router.protocol.subjects import Subjects
from router.publisher.event_publisher import flush_window_s
from router.runtime.bus.connection import connection

BLOCKS_PER_S = 100_000
GOAL_S = 0.05
SETTLE_S = 0.5
"""At the start nothing is counted for so long."""

QUIET_S = 0.5
"""Once everything was published and nothing came for so long, everything has come."""


class Pace(Struct, frozen=True):
    """A fleet, in a namespace of its own, that stores blocks for so long."""

    namespace: str
    workers: int
    seconds: float


def visible_rows(scale: EventScale) -> list[Row]:
    """Milliseconds to visible, at 100 k blocks stored a second in all, in fleets of two sizes."""
    with (
        running_server() as server,
        process_anywhere() as writer,
        process_on(READER_CORE) as reader,
    ):
        # A reader that still imports its modules would miss that everything was published.
        reader.submit(stop_subject, Pace("", 1, 0.0)).result()
        return [
            row
            for workers in scale.fleets
            for row in _rows(server.url, writer, reader, workers, scale)
        ]


def _rows(
    url: str, writer: Executor, reader: Executor, workers: int, scale: EventScale
) -> list[Row]:
    rounds = [
        _round_s(url, writer, reader, Pace(f"w{workers}-{n}", workers, scale.visible_s))
        for n in range(scale.rounds)
    ]
    window_s = flush_window_s(workers)
    goal_s = max(GOAL_S, 1.2 * window_s)
    return [
        Bounded(
            f"{workers:,} workers, {label}",
            1e3 * median(quantile(times_s, fraction) for times_s in rounds),
            1e3 * fraction * window_s,
            "ms",
            1e3 * goal_s,
            lower=True,
        )
        for label, fraction in (("median", 0.5), ("p99", 0.99))
    ]


def quantile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that so large a part does not exceed."""
    return sorted(values)[math.ceil(fraction * len(values)) - 1]


def _round_s(url: str, writer: Executor, reader: Executor, pace: Pace) -> list[float]:
    applied = reader.submit(follow, url, pace)
    sent = writer.submit(write, url, pace).result()
    return _delays_s(sent, applied.result())


def _delays_s(sent: Sequence[Sent], applied: Sequence[Applied]) -> list[float]:
    """Of each request stored after things have settled."""
    seen: dict[int, list[Applied]] = defaultdict(list)
    for each in applied:
        seen[each.worker_id].append(each)
    first_ns = min(ns for message in sent for ns in message.stored_ns)
    delays_s = []
    for message in sent:
        visible_ns = _visible_ns(seen[message.worker_id], message.event_id)
        delays_s += [
            (visible_ns - ns) / 1e9 for ns in message.stored_ns if ns > first_ns + SETTLE_S * 1e9
        ]
    return delays_s


def _visible_ns(applied: list[Applied], event_id: int) -> int:
    """When an event was visible; a checkpoint may have replaced its message."""
    index = bisect_left(applied, event_id, key=lambda each: each.event_id)
    return applied[index].visible_ns


def follow(url: str, pace: Pace) -> list[Applied]:
    """Read until the stop signal. Returns when each message was visible."""
    return uvloop.run(_follow(url, pace))


def write(url: str, pace: Pace) -> list[Sent]:
    """Store blocks, and tell the reader when everything was published."""
    return uvloop.run(_write(url, pace))


async def _follow(url: str, pace: Pace) -> list[Applied]:
    core = TimedCore()
    async with connection(url, "reader", lambda _: None) as bus:
        stop = await bus.client.subscribe(stop_subject(pace))
        reader = CoreReader(pace.namespace, pace.workers, core)
        async with reader.following(bus):
            await anext(stop.messages)
            await _until_quiet(core)
    return core.applied


async def _until_quiet(core: TimedCore) -> None:
    known = -1
    while len(core.applied) > known:
        known = len(core.applied)
        await asyncio.sleep(QUIET_S)


async def _write(url: str, pace: Pace) -> list[Sent]:
    async with connection(url, "writer", lambda _: None) as bus:
        fleet = PacedFleet(bus, Subjects(pace.namespace), pace.workers)
        sent = await fleet.store(pace.seconds, BLOCKS_PER_S)
        await bus.client.publish(stop_subject(pace))
        return sent


def stop_subject(pace: Pace) -> str:
    """Where the reader learns that everything was published."""
    return f"bench.stop.{pace.namespace}"
