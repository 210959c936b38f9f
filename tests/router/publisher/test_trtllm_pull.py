"""A server asked for its events over real HTTP: what it answers, and what is no answer."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from builders import IDENTITY
from engines import names
from router.protocol.values import Doubt, Rank, Tier
from router.publisher import trtllm_pull
from router.publisher.follower import FollowerCondition
from router.publisher.journal import EventJournal
from router.publisher.normalizer import Normalizer
from router.publisher.pull_follower import PullFollower, PullSettings
from router.publisher.trtllm_pull import TrtllmPull
from servers import eventually
from trtllm_server import TrtllmServer


class Pulling:
    """Followers of a server's ranks, and what they were told."""

    def __init__(self, server, dp_ranks=(0,)):
        self.journals, self.followers, self.lots = {}, {}, []
        for dp_rank in dp_ranks:
            journal = EventJournal(Rank(7, dp_rank), 1, IDENTITY)
            normalizer, settings = Normalizer(journal, IDENTITY), PullSettings(server.url)
            self.journals[dp_rank] = journal
            self.followers[dp_rank] = PullFollower(
                Rank(7, dp_rank), journal, normalizer, settings, self.lots.append
            )
        self.pull = TrtllmPull(server.url, list(self.followers.values()), 0.02)

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


async def test_what_is_told_is_held(server):
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
async def test_of_an_unreadable_answer_only_what_it_told_is_lost(
    server, garbage, problem, monkeypatch, caplog
):
    monkeypatch.setattr(trtllm_pull, "LIMIT_BYTES", 8_000)
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


async def test_what_is_no_event_is_doubted(server):
    async with Pulling(server).running() as pulling:
        server.store(1, 4)
        await eventually(lambda: pulling.held() == blocks(1, 4))
        server.garbage = b'[{"event_id": "x"}]'
        await eventually(lambda: pulling.doubts & Doubt.UNREADABLE)
        assert pulling.held() == blocks(1, 4)


async def test_ranks_get_their_own():
    with TrtllmServer(ranks=(0, 1)) as server:
        server.store(1, 3, rank=0)
        server.store(5, 6, rank=1)
        async with Pulling(server, dp_ranks=(0, 1)).running() as pulling:
            await eventually(lambda: pulling.held(0) == blocks(1, 3))
            await eventually(lambda: pulling.held(1) == blocks(5, 6))
