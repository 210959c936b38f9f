"""From an engine's socket into the index, in one process on one core: a router without a bus.

An engine process publishes everything at once, in batches of 8 events of 16 blocks, tokens and all;
the reader decodes, names the blocks, keeps the journal, and applies what the journal says every
20 ms, as bytes. `stored and removed`: its pool is full, so that every block stored removes another,
with one event for each; pairs are counted.

Beside it, as the plain alternative: the same payloads decoded by msgspec, names in a set; no
socket, no hashing of tokens, no journal, no index.
"""

import asyncio
import time
from concurrent.futures import Executor
from contextlib import aclosing
from statistics import median

import uvloop
import zmq
from events_engine import STOP, Traffic, payloads, run_engine
from events_processes import READER_CORE, free_port, process_anywhere, process_on
from events_reader import IDENTITY, INCARNATION, announcement, core_parts
from events_scale import EventScale
from msgspec import msgpack
from rows import Row
from timing import Bounded, alternate

from router.core.commands import Apply, ApplySlice, UpsertWorker
from router.core.core import RouterCore
from router.protocol.events import decode_log_message, encode_log_message
from router.protocol.values import Rank
from router.publisher.batch_order.address import EngineAddress
from router.publisher.batch_order.batch_order import BatchOrder, BatchOrderSettings
from router.publisher.event_publisher import MIN_FLUSH_S
from router.publisher.feed.engine_feed import EngineFeed
from router.publisher.feed.pacing import Pacing
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.zmq.sockets import Context
from router.publisher.zmq.source import SourceStatus, ZmqSource

RANK = Rank(0, 0)
ROOMY, FULL = 1 << 40, 16_384
GOAL_STORED, GOAL_PAIRS = 1.0, 0.4
PATIENCE_S = 60.0


def zmq_rows(scale: EventScale) -> list[Row]:
    """Million blocks, or pairs of one stored and one removed, a second."""
    with process_anywhere() as engine, process_on(READER_CORE) as reader:
        return [
            _row(name, engine, reader, pool_blocks, goal, scale)
            for name, pool_blocks, goal in (
                ("stored", ROOMY, GOAL_STORED),
                ("stored and removed", FULL, GOAL_PAIRS),
            )
        ]


def _row(
    name: str, engine: Executor, reader: Executor, pool_blocks: int, goal: float, scale: EventScale
) -> Row:
    traffic = Traffic(_endpoint(), _endpoint(), scale.engine_batches, pool_blocks)
    sides = [
        lambda _: _ours_s(engine, reader, traffic),
        lambda _: reader.submit(plain_s, traffic).result(),
    ]
    ours_s, peer_s = map(median, alternate(sides, scale.rounds, warm_up=True))
    rates = [traffic.blocks / times_s / 1e6 for times_s in (ours_s, peer_s)]
    return Bounded(name, *rates, "M/s", goal, lower=False)


def _endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def _ours_s(engine: Executor, reader: Executor, traffic: Traffic) -> float:
    running = engine.submit(run_engine, traffic)
    seconds: float = reader.submit(read_s, traffic).result()
    running.result()
    return seconds


def read_s(traffic: Traffic) -> float:
    """Seconds from the first block to the last, both in the index."""
    return uvloop.run(_read_s(traffic))


def plain_s(traffic: Traffic) -> float:
    """Seconds to decode everything, and keep a set."""
    batches = payloads(traffic)
    held: set[int] = set()
    start_s = time.perf_counter()
    for payload in batches:
        for event in msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                held.update(event["block_hashes"])
            else:
                held.difference_update(event["block_hashes"])
    return time.perf_counter() - start_s


async def _read_s(traffic: Traffic) -> float:
    edge = _Edge()
    with zmq.Context() as context:
        source = ZmqSource(
            context,
            EngineAddress(traffic.events_endpoint, traffic.replay_endpoint),
            BatchOrder(time.monotonic(), BatchOrderSettings()),
            SourceStatus(),
            Pacing(),
        )
        async with asyncio.timeout(PATIENCE_S):
            seconds = await _follow_s(source, edge, traffic.blocks)
        await _stop(context, traffic)
    edge.require_held(min(traffic.blocks, traffic.pool_blocks))
    return seconds


async def _follow_s(source: ZmqSource, edge: "_Edge", blocks: int) -> float:
    start_s = 0.0
    async with aclosing(source.read()) as lots:
        async for steps in lots:
            now_s = time.monotonic()
            start_s = start_s if edge.stored_blocks else now_s
            edge.feed.take(steps, now_s)
            edge.flush_when_due(now_s)
            if edge.stored_blocks == blocks:
                edge.flush(time.monotonic())
                return time.monotonic() - start_s
    raise RuntimeError("the source ended")


async def _stop(context: Context, traffic: Traffic) -> None:
    with context.socket(zmq.DEALER) as socket:
        socket.connect(traffic.replay_endpoint)
        socket.send_multipart([b"", STOP])
        await asyncio.sleep(0.1)


class _Edge:
    """One rank's feed, and the core that receives it."""

    def __init__(self) -> None:
        self._journal = EventJournal(RANK, INCARNATION, IDENTITY)
        self._normalizer = Normalizer(self._journal, IDENTITY)
        self.feed = EngineFeed(self._journal, self._normalizer, RANK.dp_rank)
        self._core = RouterCore(*core_parts())
        self._core.handle(UpsertWorker(announcement(RANK.worker_id)), 0.0)
        self._flushed_s = 0.0

    @property
    def stored_blocks(self) -> int:
        return self._normalizer.stats.counts.stored

    def flush_when_due(self, now_s: float) -> None:
        if now_s >= self._flushed_s + MIN_FLUSH_S:
            self.flush(now_s)

    def flush(self, now_s: float) -> None:
        self._flushed_s = now_s
        for message in self._journal.take():
            self._core.handle(Apply(decode_log_message(encode_log_message(message))), now_s)
            while self._core.handle(ApplySlice(), 0.0)[0]:
                pass

    def require_held(self, blocks: int) -> None:
        states = self._core.index.rank_states()
        held = [sum(state.held.counts) for state in states]
        if held != [blocks]:
            raise RuntimeError(f"ranks hold {held}, not {blocks:,} blocks")
