"""A whole bridge: an engine's real sockets on one side, a router's core on the other."""

import asyncio
import time
from contextlib import asynccontextmanager
from random import Random

import pytest
import zmq

from router.core.commands import (
    Apply,
    ApplyLoad,
    ApplySlice,
    MarkBeacon,
    SetConnected,
    Tick,
    UpsertWorker,
)
from router.core.core import RouterCore
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.events import decode_log_message
from router.protocol.loads import decode_load_report
from router.protocol.subjects import Subjects
from router.protocol.values import Doubt, Rank
from router.publisher.batch_order.address import engine_address
from router.publisher.bridge import BridgeSettings, EngineBridge
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.follower import FollowerSettings
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.journal.journal import EventJournal
from router.publisher.load_publisher import ReceivedBeacons
from router.publisher.normalizer.normalizer import Normalizer
from support.engines.engines import names
from support.engines.zmq_engines import Engine, EngineProcess, cleared, removed, stored
from support.fleets.memory_transport import MemoryTransport
from support.values.builders import IDENTITY, announcement, settings

RANK = Rank(1, 0)


class Router(MemoryTransport):
    """A transport with a router's core at its other end."""

    def __init__(self):
        super().__init__()
        self.core = RouterCore(settings(), RadixTree, Random(5))
        self.core.handle(SetConnected(True), time.monotonic())
        self.beacons = ReceivedBeacons()
        self.last_report = None

    def announce(self, incarnation):
        worker = announcement(RANK.worker_id, incarnation=incarnation)
        self.core.handle(UpsertWorker(worker), time.monotonic())

    async def append(self, subject, payload, **arguments):
        sequence = await super().append(subject, payload, **arguments)
        self.core.handle(Apply(decode_log_message(payload)), time.monotonic())
        while self.core.handle(ApplySlice(), 0.0)[0]:
            pass
        return sequence

    async def broadcast(self, subject, payload):
        self.last_report = decode_load_report(payload)
        self.core.handle(ApplyLoad(self.last_report), time.monotonic())

    async def send_beacons(self):
        while True:
            now_s = time.monotonic()
            self.core.handle(Tick(), now_s)
            self.beacons.record(self.core.handle(MarkBeacon(), now_s)[0], now_s)
            await asyncio.sleep(0.1)

    @property
    def held(self):
        return {int(h) for _, blocks in self.core.dump() for h in blocks.sequence_hashes}

    @property
    def trust(self):
        return self.core.trust(RANK, time.monotonic()).state.value


async def no_other_owner():
    """The worker id is ours."""


class Bridged:
    """A router, and a bridge between it and an engine."""

    def __init__(self, engine, router=None, state_path=None, flush_interval_s=0.02):
        self.router = router or Router()
        journal = EventJournal(RANK, time.time_ns() // 1000, IDENTITY)
        self.router.announce(journal.incarnation)
        address = engine_address(engine.endpoint, engine.replay_endpoint, "kv@")
        self.bridge = EngineBridge(
            RANK,
            journal,
            Normalizer(journal, IDENTITY),
            Subjects("test"),
            BridgeSettings(FollowerSettings(address, state_path=state_path), flush_interval_s, 0.1),
            self.router.beacons,
            Pacing(),
            SliceScheduler(),
        )

    @asynccontextmanager
    async def running(self):
        stop = asyncio.Event()
        beacons = asyncio.create_task(self.router.send_beacons())
        with zmq.Context() as context:
            running = asyncio.create_task(
                self.bridge.run(context, self.router, no_other_owner, stop)
            )
            try:
                yield self
            finally:
                stop.set()
                await running
                beacons.cancel()
                await asyncio.wait([beacons])

    def is_exactly(self, blocks):
        return self.router.held == blocks and self.router.trust == "exact"


@pytest.fixture
def engine():
    with EngineProcess(topic="kv@w1") as engine:
        yield engine


def events(life, count):
    """Batches of one block each; in every life others, though named alike."""
    return [[stored([100 + n], [life * 1000 + n] * 4)] for n in range(count)]


def blocks(life, count):
    return {names([life * 1000 + n] * 4)[0] for n in range(count)}


def publish(engine, batches):
    for batch in batches:
        engine.publish(*batch)


async def test_router_index_equals_the_engines_blocks(engine, eventually):
    publish(engine, events(1, 30))
    async with Bridged(engine).running() as bridged:
        await eventually(lambda: bridged.is_exactly(blocks(1, 30)))
        publish(engine, [[removed([100])], [stored([500], [7] * 4, parent=101)]])
        expected = blocks(1, 30) - blocks(1, 1) | {names([1001] * 4 + [7] * 4)[1]}
        await eventually(lambda: bridged.is_exactly(expected))
        engine.publish(cleared())
        await eventually(lambda: bridged.is_exactly(set()))


@pytest.mark.parametrize("count", [0, 199, 200, 260])
async def test_no_ghosts_after_a_restart(engine, eventually, count):
    publish(engine, events(1, 200))
    async with Bridged(engine).running() as bridged:
        await eventually(lambda: bridged.is_exactly(blocks(1, 200)))
        engine.restart(*events(2, count))
        await eventually(lambda: bridged.is_exactly(blocks(2, count)))
        assert bridged.bridge.follower.feed.counters.lost == 0


async def test_a_dead_engine_is_not_exact_for_long(engine, eventually):
    publish(engine, events(1, 20))
    async with Bridged(engine).running() as bridged:
        await eventually(lambda: bridged.is_exactly(blocks(1, 20)))
        engine.kill()
        await eventually(lambda: bridged.router.trust == "lagging")
        engine.start()
        await eventually(lambda: bridged.is_exactly(set()))


async def test_a_lost_batch_is_brought_back(eventually):
    with Engine(topic="kv@w1") as engine:
        publish(engine, events(1, 3))
        async with Bridged(engine).running() as bridged:
            await eventually(lambda: bridged.is_exactly(blocks(1, 3)))
            engine.lose(*events(1, 4)[3])
            publish(engine, events(1, 5)[4:])
            await eventually(lambda: bridged.is_exactly(blocks(1, 5)))


async def test_without_replay_a_gap_clears_and_is_doubted(eventually):
    with Engine(topic="kv@w1", has_replay=False) as engine:
        async with Bridged(engine).running() as bridged:
            await eventually(lambda: bridged.router.trust == "degraded" and engine.is_heard)
            publish(engine, events(1, 3))
            await eventually(lambda: bridged.is_exactly(blocks(1, 3)))
            engine.lose(*events(1, 4)[3])
            publish(engine, events(1, 6)[4:])
            await eventually(lambda: bridged.router.held == blocks(1, 6) - blocks(1, 4))
            await eventually(lambda: bridged.router.trust == "degraded")
            await eventually(lambda: bridged.router.last_report.state.doubts == Doubt.EVENTS_LOST)


async def test_a_poisoned_batch_is_dropped_alone(eventually):
    with Engine(topic="kv@w1") as engine:
        async with Bridged(engine).running() as bridged:
            publish(engine, events(1, 3))
            engine.publish_payload(b"\xc1 poison")
            engine.publish({"type": "BlockStored"}, *events(1, 4)[3])
            await eventually(lambda: bridged.router.held == blocks(1, 4))
            await eventually(lambda: bridged.router.trust == "degraded")
            assert bridged.bridge.follower.feed.counters.unreadable == 1


async def test_unknown_field_is_doubted_by_routers_too(eventually):
    with Engine(topic="kv@w1") as engine:
        async with Bridged(engine).running() as bridged:
            publish(engine, events(1, 3))
            engine.publish({**events(1, 4)[3][0], "tenant": "x"})
            await eventually(lambda: bridged.router.held == blocks(1, 4))
            await eventually(lambda: bridged.router.trust == "degraded")
            problem = bridged.bridge.follower.status(time.monotonic()).problem
            assert "field `tenant` of BlockStored" in problem


async def test_history_that_rolled_over_is_doubted(eventually):
    with Engine(topic="kv@w1", buffer_steps=10) as engine:
        publish(engine, events(1, 30))
        engine.wait()
        async with Bridged(engine).running() as bridged:
            expected = blocks(1, 30) - blocks(1, 20)
            await eventually(lambda: bridged.router.held == expected)
            await eventually(lambda: bridged.router.trust == "degraded")


async def test_a_restarted_agent_goes_on_where_it_stopped(eventually, tmp_path):
    """Also where the engine's buffer does not reach back to the beginning any more."""
    state_path = tmp_path / "rank-0"
    with Engine(topic="kv@w1", buffer_steps=20) as engine:
        async with Bridged(engine, state_path=state_path).running() as bridged:
            await eventually(lambda: engine.replays)
            publish(engine, events(1, 50))
            await eventually(lambda: bridged.is_exactly(blocks(1, 50)))
        publish(engine, [[removed([100])], *events(1, 55)[50:]])
        engine.wait()
        expected = blocks(1, 55) - blocks(1, 1)
        async with Bridged(engine, bridged.router, state_path=state_path).running() as again:
            await eventually(lambda: again.is_exactly(expected))
            assert (
                again.bridge.follower.feed.counters.applied,
                again.bridge.follower.feed.counters.lost,
            ) == (6, 0)


async def test_an_agent_that_was_away_while_the_engine_restarted(engine, eventually, tmp_path):
    state_path = tmp_path / "rank-0"
    async with Bridged(engine, state_path=state_path).running() as bridged:
        publish(engine, events(1, 20))
        await eventually(lambda: bridged.is_exactly(blocks(1, 20)))
    engine.restart(*events(2, 40))
    async with Bridged(engine, bridged.router, state_path=state_path).running() as again:
        await eventually(lambda: again.is_exactly(blocks(2, 40)))


async def test_a_damaged_state_is_passed_over(engine, eventually, tmp_path):
    state_path = tmp_path / "rank-0"
    state_path.write_bytes(b"damaged")
    publish(engine, events(1, 20))
    async with Bridged(engine, state_path=state_path).running() as bridged:
        await eventually(lambda: bridged.is_exactly(blocks(1, 20)))


async def test_stop_publishes_pending_events(engine, eventually):
    publish(engine, events(1, 20))
    async with Bridged(engine, flush_interval_s=0.3).running() as bridged:
        await eventually(lambda: bridged.bridge.follower.feed.counters.applied == 20)
    assert bridged.router.held == blocks(1, 20)
