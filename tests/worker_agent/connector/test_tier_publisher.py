"""What a manager's tiers hold, over real sockets, up to an agent's journal."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager, closing, suppress
from itertools import count

import pytest

from router.errors import WireError
from router.protocol.events import STORED
from router.protocol.values import SCHEME, Identity, Rank, Tier
from router.publisher.feed.tier_feed import TierFeed
from router.publisher.feed.tier_wire import (
    LENGTH,
    PART_BLOCKS,
    VERSION,
    Held,
    Hello,
    Paths,
    TierEvent,
    TierEvents,
    encode,
)
from router.publisher.follower.tier_follower import TierFollower
from router.publisher.journal.consolidator import JournalConsolidator
from router.publisher.journal.journal import EventJournal
from support.blocks.tier_stacks import name
from support.engines.engines import IDENTITY
from support.processes.listening import listening
from support.processes.servers import eventually, free_port
from worker_agent.blocks.changes import BlockRemoved, BlockStored
from worker_agent.connector import tier_publisher
from worker_agent.connector.tier_publisher import TierPublisher
from worker_agent.sharing.errors import PeerError
from worker_agent.tiers.stack import TierChange


def stores(tier, *numbers):
    return [TierChange(tier, BlockStored(name(number))) for number in numbers]


def removes(tier, *numbers):
    return [TierChange(tier, BlockRemoved(name(number))) for number in numbers]


class Agent:
    """A journal that follows a manager."""

    def __init__(self, address, identity=IDENTITY):
        self.journal = EventJournal(Rank(7, 0), 1, identity)
        self.source = JournalConsolidator(self.journal).source()
        self.told = 0
        self.follower = TierFollower(address, self.source, 0, self.note)

    def note(self, since_s):
        assert since_s <= time.monotonic()
        self.told += 1

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.follower.run())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def holds(self, tier, *numbers):
        return set(self.journal.held(tier).tolist()) == set(numbers) and self.is_exact()

    def is_exact(self):
        follower = self.follower
        return follower.problem is None and follower.waiting_s(time.monotonic()) < 1.0


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
async def test_reader_gets_held_blocks_then_changes(tmp_path, kind):
    address = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{tmp_path}/news"
    with closing(TierPublisher(address, IDENTITY, 0)) as news:
        news.publish(stores(Tier.HOST, *range(PART_BLOCKS + 5)))
        async with Agent(news.address).running() as agent:
            await eventually(lambda: agent.holds(Tier.HOST, *range(PART_BLOCKS + 5)))
            assert agent.journal.state.holes == (0, 0, 0, 0)
            news.publish(removes(Tier.HOST, 1) + stores(Tier.DISK, 1, 2))
            await eventually(lambda: agent.holds(Tier.DISK, 1, 2))
            assert 1 not in agent.journal.held(Tier.HOST)
            assert agent.journal.state.holes == (0, 1, 0, 0)
            assert agent.told


async def test_restarted_manager_is_followed_from_a_snapshot():
    port = free_port()
    async with Agent(f"tcp://127.0.0.1:{port}").running() as agent:
        await eventually(lambda: agent.follower.failures)
        assert "no connection" not in agent.follower.problem
        with closing(TierPublisher(f"tcp://127.0.0.1:{port}", IDENTITY, 0)) as news:
            news.publish(stores(Tier.HOST, 1, 2) + stores(Tier.DISK, 1))
            await eventually(lambda: agent.holds(Tier.HOST, 1, 2))
        await eventually(lambda: agent.follower.problem)
        assert set(agent.journal.held(Tier.HOST).tolist()) == {1, 2}
        with closing(TierPublisher(f"tcp://127.0.0.1:{port}", IDENTITY, 0)) as news:
            news.publish(stores(Tier.DISK, 1))
            await eventually(lambda: agent.holds(Tier.HOST))
            assert agent.holds(Tier.DISK, 1)
        assert agent.follower.snapshots == 2


@pytest.mark.parametrize(
    ("identity", "dp_rank", "said"),
    [
        (Identity(SCHEME, 16), 0, "its blocks are of 16 tokens"),
        (Identity("other", 4), 0, "by other"),
        (Identity(SCHEME, 4, eagle=True), 0, "of pairs"),
        (IDENTITY, 1, "it is of rank 1, expected rank 0"),
    ],
)
async def test_another_model_s_or_rank_s_news_are_refused(identity, dp_rank, said):
    with closing(TierPublisher("tcp://127.0.0.1:0", identity, dp_rank)) as news:
        news.publish(stores(Tier.HOST, 1))
        async with Agent(news.address).running() as agent:
            await eventually(lambda: said in (agent.follower.problem or ""))
            assert agent.follower.waiting_s(time.monotonic()) > 1000
            assert not len(agent.journal.held(Tier.HOST))


HELLO = encode(Hello(VERSION, IDENTITY, 0))
BEAT = encode(TierEvents([], is_all=True))
BROKEN = [
    (BEAT, "an unexpected message"),
    (encode(Hello(99, IDENTITY, 0)), "version 99"),
    (LENGTH.pack(1 << 30), "a message of 1073741824 bytes"),
    (LENGTH.pack(2) + b"xx", "malformed"),
    (HELLO + LENGTH.pack(5) + b"\x93\x01\x01\x92\x00", "malformed"),
]


@pytest.mark.parametrize(("sent", "said"), BROKEN, ids=[said for _, said in BROKEN])
async def test_unreadable_frame_ends_the_connection_and_clears_its_tiers(sent, said):
    async def answer(reader, writer):
        writer.write(sent)
        await reader.read()
        writer.close()

    async with listening(answer) as port, Agent(f"tcp://127.0.0.1:{port}").running() as agent:
        await eventually(lambda: said in (agent.follower.problem or ""))


def test_empty_messages_change_nothing():
    agent = Agent("tcp://127.0.0.1:1")
    feed = TierFeed(agent.source, 0)
    for _ in range(2):
        feed.take(Hello(VERSION, IDENTITY, 0))
        feed.take(Held(Tier.HOST, Paths(b"", b"")))
        assert feed.take(TierEvents([], is_all=True))
        stored = TierEvent(STORED, Tier.HOST, Paths(bytes(8), bytes(24)))
        assert not feed.take(TierEvents([stored], is_all=False))
        assert agent.journal.state.counts == (0, 1, 0, 0)
    for broken in (Paths(bytes(7), b""), Paths(bytes(8), bytes(8)), Paths(bytes(8), b"")):
        with pytest.raises(WireError, match="heads"):
            feed.take(TierEvents([TierEvent(STORED, Tier.HOST, broken)], is_all=False))
    with pytest.raises(WireError, match="not in order"):
        feed.take(
            TierEvents([TierEvent(STORED, Tier.HOST, Paths(bytes(8), bytes(48)))], is_all=False)
        )
    feed.forget()
    assert agent.journal.state.counts == (0, 0, 0, 0)


def published_until_dropped(news, first):
    """Publish 500 blocks. Returns the blocks published, once a reader was dropped."""
    news.publish(stores(Tier.HOST, *range(first, first + 500)))
    return news.dropped_readers and first + 500


@pytest.mark.long
async def test_slow_reader_is_dropped_and_gets_everything_later(monkeypatch):
    monkeypatch.setattr(tier_publisher, "MAX_QUEUED_BYTES", 10_000)
    with closing(TierPublisher("tcp://127.0.0.1:0", IDENTITY, 0)) as news:
        host, port = news.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))):
            first = count(0, 500)
            numbers = await eventually(lambda: published_until_dropped(news, next(first)))
        async with Agent(news.address).running() as agent:
            await eventually(lambda: agent.holds(Tier.HOST, *range(numbers)))


async def test_readers_are_limited(monkeypatch):
    monkeypatch.setattr(tier_publisher, "MAX_READERS", 1)
    with closing(TierPublisher("tcp://127.0.0.1:0", IDENTITY, 0)) as news:
        async with Agent(news.address).running() as agent:
            await eventually(agent.is_exact)
            async with Agent(news.address).running() as other:
                await eventually(lambda: other.follower.failures and news.dropped_readers)
            assert agent.is_exact()


@pytest.mark.parametrize("address", ["http://x:1", "tcp://127.0.0.1", "tcp://:x"])
def test_invalid_addresses_are_refused(address):
    with pytest.raises(PeerError, match="neither"):
        TierPublisher(address, IDENTITY, 0)
