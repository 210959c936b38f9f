"""Batches off real sockets: an engine's whole life, its restarts, and what is lost on the way."""

import asyncio
import gc
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
import uvloop
import zmq

from router.publisher.batch_order.address import EngineAddress
from router.publisher.batch_order.batch_order import BatchOrder, BatchOrderSettings
from router.publisher.batch_order.steps import Apply, Lost, NewLife
from router.publisher.feed.pacing import Pacing
from router.publisher.zmq.connection_monitor import Condition
from router.publisher.zmq.sockets import MOST_WAITING_BYTES, ReplayCalls, Subscription
from router.publisher.zmq.source import SourceStatus, ZmqSource
from router.publisher.zmq.wakeups import Wakeups
from support.engines.zmq_engines import Engine, EngineProcess


class Reading:
    """A source being read, and what it said since the last new life."""

    def __init__(self, context, engine, topic="", saved=None, pacing=None, **settings):
        can_replay = engine.replay_endpoint is not None
        self.log = BatchOrder(
            time.monotonic(), BatchOrderSettings(can_replay=can_replay, **settings), saved
        )
        address = EngineAddress(engine.endpoint, engine.replay_endpoint, topic)
        self.status = SourceStatus()
        self.source = ZmqSource(context, address, self.log, self.status, pacing or Pacing())
        self.payloads, self.lost, self.lives = [], [], 0
        self.has_passed_on_proof = False

    async def run(self):
        async for steps in self.source.read():
            self.has_passed_on_proof |= self.log.is_following
            for step in steps:
                self._take(step)

    def _take(self, step):
        match step:
            case Apply(_, payload):
                self.payloads.append(payload)
            case NewLife():
                self.payloads, self.lost = [], []
                self.lives += 1
            case Lost():
                self.lost.append(step)

    @property
    def is_settled(self):
        """Nothing is missing."""
        return self.log.waiting_s(time.monotonic()) < 60.0

    def names(self):
        return [msgspec.msgpack.decode(payload)[1][0] for payload in self.payloads]


@asynccontextmanager
async def reading(engine, **fields):
    with zmq.Context() as context:
        reading = Reading(context, engine, **fields)
        task = asyncio.create_task(reading.run())
        try:
            yield reading
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.stop()


@pytest.fixture
def process():
    process = EngineProcess()
    yield process
    process.kill()


def names(life, count, first=0):
    return [f"{life}.{i}" for i in range(first, count)]


def publish(engine, life, count):
    for name in names(life, count):
        engine.publish(name)


async def until_read(eventually, reading, expected):
    try:
        await eventually(lambda: reading.names() == expected and reading.is_settled)
    except TimeoutError:
        assert reading.names() == expected
        raise


async def test_a_replay_without_news_is_passed_on_before_the_next_tick(eventually):
    pacing = Pacing()
    pacing.engines = 1 << 20  # ticks are minutes apart
    with Engine() as engine:
        async with reading(engine, pacing=pacing) as one:
            await eventually(lambda: one.has_passed_on_proof)


@pytest.mark.parametrize("with_topic", [True, False])
async def test_an_older_engine_is_replayed_then_followed(eventually, with_topic):
    with Engine(with_topic=with_topic, topic="kv@w0") as engine:
        publish(engine, "a", 50)
        async with reading(engine, topic="kv@") as one:
            await until_read(eventually, one, names("a", 50))
            publish(engine, "b", 50)
            await until_read(eventually, one, names("a", 50) + names("b", 50))
            assert (one.lives, one.lost) == (0, [])


async def test_live_batches_come_without_replays(engine, eventually):
    engine.start()
    async with reading(engine) as one:
        publish(engine, "a", 5)
        await until_read(eventually, one, names("a", 5))
        replays = engine.replays
        publish(engine, "b", 2000)
        await eventually(lambda: len(one.payloads) == 2005)
        assert engine.replays <= replays + 1


@pytest.mark.parametrize("count", [0, 10, 19, 20, 21, 40])
async def test_a_killed_engine_that_is_restarted(process, eventually, count):
    """Fewer, as many and more batches; the old numbers are passed before we are back."""
    process.start()
    async with reading(process) as one:
        publish(process, "a", 20)
        await until_read(eventually, one, names("a", 20))
        process.restart(*([name] for name in names("b", count)))
        await eventually(lambda: one.lives)
        await until_read(eventually, one, names("b", count))
        publish(process, "c", 3)
        await until_read(eventually, one, names("b", count) + names("c", 3))
        assert (one.lives, one.lost) == (1, [])


async def test_an_engine_that_was_never_used_is_restarted(engine, eventually):
    engine.start()
    async with reading(engine) as one:
        await eventually(lambda: one.is_settled)
        engine.restart()
        await eventually(lambda: one.status.connections == 2 and one.is_settled)
        publish(engine, "b", 3)
        await until_read(eventually, one, names("b", 3))


async def test_a_gap_is_replayed(engine, eventually):
    engine.start()
    async with reading(engine) as one:
        publish(engine, "a", 3)
        await until_read(eventually, one, names("a", 3))
        engine.lose("lost")
        publish(engine, "b", 3)
        await until_read(eventually, one, [*names("a", 3), "lost", *names("b", 3)])
        assert (one.lives, one.lost) == (0, [])


async def test_a_lost_last_batch_is_found_by_a_probe(engine, eventually):
    engine.start()
    async with reading(engine) as one:
        publish(engine, "a", 3)
        engine.lose("lost")
        await until_read(eventually, one, [*names("a", 3), "lost"])


async def test_a_gap_without_replay_is_lost(eventually):
    with Engine(has_replay=False) as engine:
        async with reading(engine) as one:
            await eventually(lambda: len(one.lost) == 1 and engine.is_heard)
            publish(engine, "a", 3)
            await until_read(eventually, one, names("a", 3))
            assert one.lost == []
            engine.lose("lost")
            publish(engine, "b", 3)
            await until_read(eventually, one, names("a", 3) + names("b", 3))
            assert one.lost == [Lost(3, 3, "a gap, and no replay")]


async def test_a_restart_without_replay_is_a_new_life_with_losses(eventually):
    with Engine(has_replay=False) as engine:
        async with reading(engine) as one:
            await eventually(lambda: len(one.lost) == 1 and engine.is_heard)
            publish(engine, "a", 20)
            await until_read(eventually, one, names("a", 20))
            engine.restart()
            await eventually(lambda: one.status.connections == 2 and one.lost)
            assert (one.names(), len(one.lost)) == ([], 1)
            await eventually(lambda: engine.is_heard)
            publish(engine, "b", 20)  # the first of its life: then nothing was lost
            await until_read(eventually, one, names("b", 20))
            assert one.lost == []


async def test_history_that_rolled_over_is_lost(eventually):
    with Engine(buffer_steps=10) as engine:
        publish(engine, "a", 50)
        engine.wait()
        async with reading(engine) as one:
            await until_read(eventually, one, names("a", 50, first=40))
            assert [(lost.first, lost.last) for lost in one.lost] == [(0, 39)]


async def test_garbage_is_counted_and_dropped(engine, eventually):
    engine.start()
    async with reading(engine) as one:
        publish(engine, "a", 3)
        await until_read(eventually, one, names("a", 3))
        for frames in ([b""], [b"", b"short", b"x"], [b"", bytes(8)], [b"", b"\xff" * 8, b""]):
            engine.send_raw(frames)
        publish(engine, "b", 3)
        await until_read(eventually, one, names("a", 3) + names("b", 3))
        assert one.status.garbage == 4


async def test_only_the_topic_is_read(eventually):
    with Engine(topic="kv@w0", has_replay=False) as engine:  # replays name no topic
        async with reading(engine, topic="other@") as one:
            await eventually(lambda: engine.is_heard)
            publish(engine, "a", 3)
            engine.send_raw([b"other@1", bytes(8), b"x"])  # what was sent before would be here now
            await eventually(lambda: one.payloads)
            assert one.payloads == [b"x"]


async def test_an_engine_that_hangs_waits_and_goes_on(engine, eventually):
    engine.start()
    async with reading(engine) as one:
        publish(engine, "a", 3)
        await until_read(eventually, one, names("a", 3))
        engine.pause()
        engine.lose("lost")
        await eventually(lambda: one.log.waiting_s(time.monotonic()) > 0.3)
        engine.resume()
        await until_read(eventually, one, [*names("a", 3), "lost"])
        assert (one.lives, one.lost) == (0, [])


async def test_an_engine_that_comes_later_is_waited_for(engine, eventually):
    async with reading(engine) as one:
        await eventually(lambda: one.status.failed_connections)
        await eventually(lambda: one.log.waiting_s(time.monotonic()) > 0.3)
        engine.start()
        publish(engine, "a", 3)
        await until_read(eventually, one, names("a", 3))


async def test_resumes_after_a_restart_of_the_reader(engine, eventually):
    engine.start()
    async with reading(engine) as one:
        publish(engine, "a", 20)
        await until_read(eventually, one, names("a", 20))
        saved = one.log.save()
    publish(engine, "b", 10)
    async with reading(engine, saved=saved) as two:
        await until_read(eventually, two, names("b", 10))
        assert (two.lives, two.lost) == (0, [])


async def test_a_reader_that_is_closed_leaves_nothing_open(engine, eventually):
    engine.start()
    async with reading(engine) as one:
        publish(engine, "a", 100)
        await eventually(lambda: one.status.connections == 1)
    gc.collect()


def test_runs_on_uvloop(process, eventually):
    async def read():
        async with reading(process) as one:
            publish(process, "a", 5)
            await until_read(eventually, one, names("a", 5))
            process.restart(["b"])
            await until_read(eventually, one, ["b"])

    process.start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(read())


async def test_messages_beyond_the_limit_of_bytes_are_dropped_and_replayed(engine, eventually):
    engine.start()
    padding = "x" * (1 << 20)
    async with reading(engine) as one:
        publish(engine, "a", 3)
        await until_read(eventually, one, names("a", 3))
        batches = 2 * MOST_WAITING_BYTES // len(padding)
        for number in range(batches):
            engine.publish(f"b.{number}", padding)
        engine.wait()  # without a turn of this loop: everything waits in the socket
        await eventually(lambda: one.status.overflows)
        await until_read(eventually, one, names("a", 3) + names("b", batches))
        assert (one.lives, one.lost) == (0, [])


async def test_replay_beyond_the_limit_of_bytes_goes_on_from_what_was_read(engine, eventually):
    engine.start()
    padding = "x" * (1 << 20)
    batches = 2 * MOST_WAITING_BYTES // len(padding)
    for number in range(batches):
        engine.publish(f"a.{number}", padding)
    engine.wait()
    async with reading(engine) as one:
        await until_read(eventually, one, names("a", batches))
        assert (one.lives, one.lost) == (0, [])


async def test_replies_beyond_the_limit_of_bytes_are_not_received(engine):
    engine.start()
    padding = "x" * (1 << 20)
    for number in range(2 * MOST_WAITING_BYTES // len(padding)):
        engine.publish(f"a.{number}", padding)
    engine.wait()
    context, wakeups, received_bytes = zmq.Context(), Wakeups(), 0
    calls = ReplayCalls(context, engine.replay_endpoint, wakeups)
    try:
        calls.request(0)
        while not calls.is_cut_off:
            await wakeups.wait(10.0)
            time.sleep(0.05)  # noqa: ASYNC251 - replies come in faster than they are read
            received_bytes += sum(len(frame) for frames in calls.receive() for frame in frames)
        assert calls.socket.closed
    finally:
        calls.close()
        context.term()
    assert MOST_WAITING_BYTES <= received_bytes < 2 * MOST_WAITING_BYTES


async def test_received_batches_are_read_after_a_disconnection(eventually):
    theirs = zmq.Context()
    publisher = theirs.socket(zmq.XPUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    with zmq.Context() as context:
        subscription = Subscription(context, f"tcp://127.0.0.1:{port}", "", Wakeups())
        try:
            await asyncio.to_thread(publisher.recv)
            for number in range(300):
                publisher.send_multipart([b"", b"%d" % number, b"batch"])
            await asyncio.to_thread(theirs.destroy, linger=30_000)
            await eventually(lambda: subscription.watch.look() is Condition.LOST)
            await eventually(lambda: not subscription.is_drained)
            read = []
            while not subscription.is_drained:
                read += [int(number) for _, number, _ in subscription.receive()]
            assert read == list(range(300))
        finally:
            subscription.close()
