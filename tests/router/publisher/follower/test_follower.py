"""An engine followed without a bus: what it holds, as the journal's owner gets to know it."""

import asyncio
import time
from contextlib import asynccontextmanager

import zmq

from router.protocol.values import Rank
from router.publisher.batch_order.address import EngineAddress
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.follower import EngineFollower, FollowerSettings
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from support.engines.engines import names
from support.engines.zmq_engines import Engine, EngineProcess, stored
from support.processes.servers import until_still
from support.values.builders import IDENTITY

RANK = Rank(1, 0)


class Following:
    """A follower, and an owner that takes the journal's messages, lot by lot."""

    def __init__(self, address, **fields):
        self.journal = EventJournal(RANK, 1, IDENTITY)
        self.follower = EngineFollower(
            RANK,
            self.journal,
            Normalizer(self.journal, IDENTITY),
            FollowerSettings(address, **fields),
            self._on_lot,
            Pacing(),
            SliceScheduler(),
        )
        self.lots, self.messages = [], []

    def _on_lot(self, lot):
        self.lots.append(lot)
        self.messages += self.journal.take()

    @property
    def held(self):
        return set(self.journal.held(0).tolist())

    @property
    def status(self):
        return self.follower.status(time.monotonic())

    def is_at(self, condition):
        return self.status.condition == condition


@asynccontextmanager
async def following(engine, **fields):
    address = EngineAddress(engine.endpoint, engine.replay_endpoint)
    with zmq.Context() as context:
        one = Following(address, **fields)
        task = asyncio.create_task(one.follower.run(context))
        try:
            yield one
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()


def publish(engine, first, last):
    """Batches of one block each."""
    for number in range(first, last):
        engine.publish(stored([number], [number] * 4))


def blocks(first, last):
    return {names([number] * 4)[0] for number in range(first, last)}


async def test_owner_receives_every_lot_at_once(eventually):
    with Engine() as engine:
        async with following(engine) as one:
            await eventually(lambda: one.is_at("following"))
            publish(engine, 0, 30)
            await eventually(lambda: one.held == blocks(0, 30))
            assert not one.journal.has_news
            assert one.messages[-1].last_event_id == one.journal.last_event_id
            assert sum(lot.steps for lot in one.lots) == 30
            assert all(lot.since_s <= lot.now_s for lot in one.lots)


async def test_as_of_follows_what_was_proven(eventually):
    with Engine() as engine:
        async with following(engine) as one:
            await eventually(lambda: one.is_at("following"))
            start_s = time.monotonic()
            await eventually(lambda: one.follower.fresh_at_s > start_s)
            assert one.follower.waiting_s(time.monotonic()) < 60.0
            engine.pause()
            await until_still(lambda: one.follower.fresh_at_s)
            engine.resume()


async def test_conditions_of_an_engine_that_comes_and_goes(eventually):
    with EngineProcess() as engine:
        engine.kill()
        async with following(engine) as one:
            assert one.is_at("connecting")
            assert one.status.silent_s is None
            engine.start()
            await eventually(lambda: one.is_at("following"))
            assert one.status.silent_s is not None
            engine.kill()
            await eventually(lambda: one.is_at("connecting"))


async def test_without_replay_it_is_blind(eventually):
    with Engine(has_replay=False) as engine:
        async with following(engine) as one:
            await eventually(lambda: one.is_at("blind") and engine.is_heard)
            publish(engine, 0, 3)
            await eventually(lambda: one.held == blocks(0, 3))


async def test_many_followers_share_a_context(eventually):
    with Engine() as first, Engine() as second, zmq.Context() as context:
        publish(first, 0, 3)
        publish(second, 5, 9)
        both = [Following(EngineAddress(e.endpoint, e.replay_endpoint)) for e in (first, second)]
        tasks = [asyncio.create_task(one.follower.run(context)) for one in both]
        await eventually(lambda: [o.held for o in both] == [blocks(0, 3), blocks(5, 9)])
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
