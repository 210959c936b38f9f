"""How soon a router that comes late is ready: it reads the checkpoint of every rank.

From the connection to the moment when every rank adds up; starting Python comes on top. Beside it,
as the plain alternative: as many bytes of hashes from the object store, by the client's own `get`,
and nothing done with them.
"""

import asyncio
import time
from concurrent.futures import Executor
from statistics import median

import uvloop
from events_processes import READER_CORE, process_anywhere, process_on, running_server
from events_reader import CoreReader
from events_scale import EventScale
from events_writer import RankWriter
from rows import Row
from timing import Bounded, alternate

from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus, StreamLimits, connection, ensure_event_stream
from router.runtime.bus.transport import NatsTransport

NAMESPACE = "join"
WORKERS = 1_000
GOAL_S_PER_BLOCK = 3.0 / 10_000_000
BUCKET, OBJECT = "bench", "hashes"
GET_TIMEOUT_S = 60.0


def late_join_rows(scale: EventScale) -> list[Row]:
    """Seconds until ready, with 1,000 checkpoints."""
    blocks = scale.join_blocks
    with (
        running_server() as server,
        process_anywhere() as writer,
        process_on(READER_CORE) as reader,
    ):
        writer.submit(fill, server.url, blocks).result()
        ours, peer = _times_s(server.url, reader, blocks, scale.rounds)
    name = f"{blocks // 1_000_000} M blocks, {WORKERS:,} ranks"
    return [Bounded(name, ours, peer, "s", blocks * GOAL_S_PER_BLOCK, lower=True)]


def _times_s(url: str, reader: Executor, blocks: int, rounds: int) -> tuple[float, float]:
    sides = [
        lambda _: reader.submit(join_s, url, blocks).result(),
        lambda _: reader.submit(get_s, url).result(),
    ]
    ours_s, peer_s = alternate(sides, rounds, warm_up=True)
    return median(ours_s), median(peer_s)


def fill(url: str, blocks: int) -> None:
    """Write a checkpoint of every rank, and the same bytes as one object."""
    asyncio.run(_fill(url, blocks))


def join_s(url: str, blocks: int) -> float:
    """Seconds until a new router has read it all."""
    return uvloop.run(_join_s(url, blocks))


def get_s(url: str) -> float:
    """Seconds until the client has got the object."""
    return uvloop.run(_get_s(url))


async def _fill(url: str, blocks: int) -> None:
    async with connection(url, "writer", lambda _: None) as bus:
        await _write_checkpoints(bus, blocks // WORKERS)
        store = await bus.js.create_object_store(BUCKET)
        await store.put(OBJECT, bytes(8 * blocks))


async def _write_checkpoints(bus: Bus, rank_blocks: int) -> None:
    subjects, limits = Subjects(NAMESPACE), StreamLimits()
    await ensure_event_stream(bus.js, subjects, limits)
    transport = NatsTransport(bus, subjects, limits)
    for worker_id in range(WORKERS):
        writer = RankWriter(subjects, worker_id, rank_blocks)
        writer.store(rank_blocks)
        await writer.flush(transport)


async def _join_s(url: str, blocks: int) -> float:
    reader = CoreReader(NAMESPACE, WORKERS)
    start_s = time.perf_counter()
    async with connection(url, "reader", lambda _: None) as bus, reader.following(bus):
        await reader.until_caught_up()
        seconds = time.perf_counter() - start_s
    reader.require_held(blocks)
    return seconds


async def _get_s(url: str) -> float:
    start_s = time.perf_counter()
    async with connection(url, "reader", lambda _: None) as bus:
        store = await bus.js.object_store(BUCKET)
        async with asyncio.timeout(GET_TIMEOUT_S):
            await store.get(OBJECT)
        return time.perf_counter() - start_s
