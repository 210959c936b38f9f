"""A server asked for its events over real HTTP: what it answers, and what is no answer."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from router.protocol.values import Doubt, Rank, Tier
from router.publisher.follower import pull_follower
from router.publisher.follower.follower import FollowerCondition
from router.publisher.follower.pull_follower import PullFollower, PullSettings, TrtllmPoller
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from support.engines.engines import names
from support.engines.trtllm_server import TrtllmServer
from support.processes.servers import eventually
from support.values.builders import IDENTITY


class Pulling:
    """Followers of a server's ranks, and what they received."""

    def __init__(self, server, dp_ranks=(0,)):
        self.journals, self.followers, self.lots = {}, {}, []
        for dp_rank in dp_ranks:
            journal = EventJournal(Rank(7, dp_rank), 1, IDENTITY)
            normalizer, settings = Normalizer(journal, IDENTITY), PullSettings(server.url)
            self.journals[dp_rank] = journal
            self.followers[dp_rank] = PullFollower(
                Rank(7, dp_rank), journal, normalizer, settings, self.lots.append
            )
        self.pull = TrtllmPoller(server.url, list(self.followers.values()), 0.02)

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.pull.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    def held(self, dp_rank=0):
        return set(self.journals[dp_rank].held(Tier.DEVICE).tolist())

    @property
    def problem(self):
        return self.followers[0].status(time.monotonic()).problem or ""

    @property
    def doubts(self):
        return Doubt(self.journals[0].doubts)


@pytest.fixture
def server():
    with TrtllmServer() as server:
        yield server


def blocks(first, last):
    return {names([n] * 4)[0] for n in range(first, last)}


async def test_pulled_events_are_held(server):
    server.store(1, 4)
    async with Pulling(server).running() as pulling:
        await eventually(lambda: pulling.held() == blocks(1, 4))
        server.remove(1)
        await eventually(lambda: pulling.held() == blocks(2, 4))
        follower = pulling.followers[0]
        assert follower.waiting_s(time.monotonic()) < 60
        assert follower.status(time.monotonic()).condition is FollowerCondition.FOLLOWING
        assert (pulling.doubts, sum(lot.steps for lot in pulling.lots)) == (Doubt(0), 2)


@pytest.mark.parametrize(
    ("garbage", "problem"),
    [(b"no JSON", "malformed"), (b'{"a": 1}', "array"), (b"[" + b" " * 9_000 + b"]", "8000 bytes")],
)
async def test_unreadable_response_loses_only_its_events(
    server, garbage, problem, monkeypatch, caplog
):
    monkeypatch.setattr(pull_follower, "LIMIT_BYTES", 8_000)
    async with Pulling(server).running() as pulling:
        server.store(1, 4)
        await eventually(lambda: pulling.held() == blocks(1, 4))
        server.garbage = garbage
        await eventually(lambda: pulling.followers[0].source.failed_connections)
        await eventually(lambda: not pulling.problem)
        server.store(4, 6)
        await eventually(lambda: pulling.held() == blocks(1, 6))
        assert pulling.doubts == Doubt(0)
    assert any(problem in record.message for record in caplog.records)


async def test_a_gap_is_a_loss_and_clears(server):
    async with Pulling(server).running() as pulling:
        server.store(1, 4)
        await eventually(lambda: pulling.held() == blocks(1, 4))
        server.skip(5)
        server.store(7, 8)
        await eventually(lambda: pulling.held() == blocks(7, 8))
        assert pulling.doubts & Doubt.EVENTS_LOST
        assert pulling.followers[0].feed.counters.new_lives == 0


async def test_invalid_event_is_a_doubt(server):
    async with Pulling(server).running() as pulling:
        server.store(1, 4)
        await eventually(lambda: pulling.held() == blocks(1, 4))
        server.garbage = b'[{"event_id": "x"}]'
        await eventually(lambda: pulling.doubts & Doubt.UNREADABLE)
        assert pulling.held() == blocks(1, 4)


async def test_each_rank_gets_its_own_events():
    with TrtllmServer(ranks=(0, 1)) as server:
        server.store(1, 3, rank=0)
        server.store(5, 6, rank=1)
        async with Pulling(server, dp_ranks=(0, 1)).running() as pulling:
            await eventually(lambda: pulling.held(0) == blocks(1, 3))
            await eventually(lambda: pulling.held(1) == blocks(5, 6))
