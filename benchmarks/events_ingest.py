"""From JetStream into the index: how fast a router on one core catches up with a long stream.

Agents flush so that a router reads at most 4,000 messages a second from 80 to 2,000 of them
(`flush_window_s`). A million blocks a second therefore come as messages of 250 blocks: the goal
is meant for those and larger ones. Smaller messages mean that fewer blocks are about; their goal
is what 4,000 of them carry.

Beside it, as the plain alternative: nats-py's ordered consumer on the same messages and core, which
only throws them away.
"""

import asyncio
import time
from concurrent.futures import Executor
from functools import partial
from statistics import median

import uvloop
from events_processes import READER_CORE, process_anywhere, process_on, running_server
from events_reader import CoreReader
from events_scale import EventScale
from events_writer import REQUEST_BLOCKS, RankWriter, write_messages
from msgspec import Struct
from nats.js import api
from rows import Row
from timing import Bounded, alternate

from router.protocol.subjects import Subjects
from router.runtime.bus.connection import StreamLimits, connection, ensure_event_stream
from router.runtime.bus.transport import NatsTransport

RANKS = 64
MESSAGE_BLOCKS = (32, 128, 256, 512)
CHURN_BLOCKS = 256
MESSAGES_PER_S = 4_000
GOAL_BLOCKS_PER_S = 1e6


class Filling(Struct, frozen=True):
    """A stream to be filled, in a namespace of its own. `pool_blocks`: what a rank has room for."""

    namespace: str
    messages: int
    message_blocks: int
    pool_blocks: int

    @property
    def blocks(self) -> int:
        """Blocks stored and removed."""
        return self.messages * self.message_blocks


def ingest_rows(scale: EventScale) -> list[Row]:
    """Million blocks a second until caught up, by blocks a message."""
    fillings = [
        Filling(f"stored-{blocks}", scale.ingest_messages, blocks, 1 << 40)
        for blocks in MESSAGE_BLOCKS
    ]
    churn = Filling("churn", scale.ingest_messages, CHURN_BLOCKS, CHURN_BLOCKS)
    names = [f"{blocks} blocks a message" for blocks in MESSAGE_BLOCKS]
    names = [f"{blocks} blocks a message" for blocks in MESSAGE_BLOCKS]
    named = zip([*names, f"{CHURN_BLOCKS}, half removed"], [*fillings, churn], strict=True)
    with (
        running_server() as server,
        process_anywhere() as writer,
        process_on(READER_CORE) as reader,
    ):
        measure = partial(_rates, server.url, writer, reader, scale.rounds)
        return [_row(name, filling, *measure(filling)) for name, filling in named]


def _row(name: str, filling: Filling, ours: float, peer: float) -> Row:
    goal = min(GOAL_BLOCKS_PER_S, MESSAGES_PER_S * filling.message_blocks)
    return Bounded(name, ours / 1e6, peer / 1e6, "M/s", goal / 1e6, lower=False)


def _rates(
    url: str, writer: Executor, reader: Executor, rounds: int, filling: Filling
) -> tuple[float, float]:
    """Blocks a second, ours and the client's alone."""
    held = writer.submit(fill, url, filling).result()
    sides = [
        lambda _: reader.submit(read_s, url, filling.namespace, held).result(),
        lambda _: reader.submit(drain_s, url, filling).result(),
    ]
    ours_s, peer_s = map(median, alternate(sides, rounds, warm_up=True))
    return filling.blocks / ours_s, filling.blocks / peer_s


def fill(url: str, filling: Filling) -> int:
    """Fill a stream; how many blocks are held at its end."""
    return asyncio.run(_fill(url, filling))


def read_s(url: str, namespace: str, held_blocks: int) -> float:
    """Seconds until a new router has read it all."""
    return uvloop.run(_read_s(url, namespace, held_blocks))


def drain_s(url: str, filling: Filling) -> float:
    """Seconds until the client's ordered consumer has handed out every message."""
    return uvloop.run(_drain_s(url, filling))


async def _fill(url: str, filling: Filling) -> int:
    subjects = Subjects(filling.namespace)
    limits = StreamLimits()
    async with connection(url, "writer", lambda _: None) as bus:
        await ensure_event_stream(bus.js, subjects, limits)
        transport = NatsTransport(bus, subjects, limits)
        writers = [RankWriter(subjects, n, filling.pool_blocks) for n in range(RANKS)]
        requests = filling.message_blocks // REQUEST_BLOCKS
        return await write_messages(writers, transport, filling.messages, requests)


async def _read_s(url: str, namespace: str, held_blocks: int) -> float:
    async with connection(url, "reader", lambda _: None) as bus:
        reader = CoreReader(namespace, RANKS)
        start_s = time.perf_counter()
        async with reader.following(bus):
            await reader.until_caught_up()
            seconds = time.perf_counter() - start_s
        reader.require_held(held_blocks)
        return seconds


async def _drain_s(url: str, filling: Filling) -> float:
    subjects = Subjects(filling.namespace)
    async with connection(url, "drain", lambda _: None) as bus:
        last = (await bus.js.stream_info(subjects.event_stream)).state.last_seq
        start_s = time.perf_counter()
        subscription = await bus.js.subscribe(
            subjects.all_events, ordered_consumer=True, deliver_policy=api.DeliverPolicy.ALL
        )
        async for message in subscription.messages:
            if message.metadata.sequence.stream == last:
                return time.perf_counter() - start_s
    raise RuntimeError("the connection was lost")
