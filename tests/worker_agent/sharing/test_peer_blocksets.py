"""Blocksets of announced workers are imported, renewed, replaced, refused and dropped."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec import json
from msgspec.structs import replace

from router.protocol.catalogue import encode_entry, worker_key
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.runtime.bus.connection import connection
from router.runtime.bus.kv_lease import KvLease
from support.blocks.sharing_process import MODEL, config_of, shared
from support.processes.servers import eventually
from support.values.builders import IDENTITY, announcement
from worker_agent.manager.manager import KvBlockManager
from worker_agent.process.announced import AnnouncedWorkers
from worker_agent.sharing.peer_blocksets import PeerBlocksets

SUBJECTS = Subjects("test")
OURS, THEIRS = Rank(1338, 0), Rank(1337, 0)


class World:
    """A worker with imports, and what others announce on the bus."""

    def __init__(self, bus, sharing):
        self.bus = bus
        self.sharing = sharing
        self.peers = PeerBlocksets(AnnouncedWorkers("default", IDENTITY), {OURS: sharing})

    async def announce(self, owner, worker_id=THEIRS.worker_id, **fields):
        blocksets = {0: json.decode(owner.export_local_blockset())}
        entry = announcement(worker_id, **{"blocksets": blocksets, **fields})
        lease = KvLease(self.bus.js, SUBJECTS, worker_key(worker_id), entry.incarnation)
        await lease.look()
        await lease.claim(encode_entry(entry))
        return lease

    @asynccontextmanager
    async def round(self):
        """A start on the bus, which begins with a round."""
        task = asyncio.create_task(self.peers.run(self.bus, SUBJECTS))
        try:
            yield
        finally:
            task.cancel()

    @property
    def epochs(self):
        return {each.export.rank: each.export.epoch for each in self.sharing.imported}

    async def until(self, **expected):
        async with self.round():
            await eventually(lambda: {name: getattr(self, name) for name in expected} == expected)

    @property
    def refused(self):
        return sorted(each.reason.partition(":")[0] for each in self.peers.imports.refused)


@pytest.fixture
async def world(nats_server):
    with KvBlockManager(config_of(OURS.worker_id)) as manager:
        sharing = shared(manager)
        async with connection(nats_server.url, "test", lambda _: None) as bus:
            yield World(bus, sharing)
        sharing.close(60)


@pytest.fixture
def owner():
    with KvBlockManager(config_of(THEIRS.worker_id)) as manager:
        yield manager


async def test_blocksets_follow_announcements(world, owner):
    first, second = shared(owner, epoch=1), shared(owner, epoch=2)
    await world.announce(world.sharing, OURS.worker_id)
    lease = await world.announce(first)
    await world.until(epochs={THEIRS: 1}, refused=[])
    async with world.round():
        assert await world.peers.find(THEIRS, OURS) == first.addresses
        assert await world.peers.find(Rank(9, 0), OURS) == ()
    lease = await world.announce(second)
    await world.until(epochs={THEIRS: 2})
    assert await world.peers.find(THEIRS, OURS) == second.addresses
    await world.announce(first)
    await world.until(epochs={}, refused=["epoch"])
    lease = await world.announce(second, incarnation=2)
    await world.until(epochs={THEIRS: 2}, refused=[])
    await lease.withdraw()
    await world.until(epochs={})
    assert world.peers.imports.refusals == 1
    first.close(60)
    second.close(60)


async def test_request_s_source_is_imported_at_once(world, owner):
    sharing = shared(owner)
    async with world.round():
        await world.announce(sharing)
        assert await world.peers.find(THEIRS, OURS) == sharing.addresses
    sharing.close(60)


async def test_useless_blocksets_are_refused_with_the_reason(world, owner):
    sharing, other = shared(owner), shared(owner, model=replace(MODEL, name="another"))
    await world.announce(sharing, 5)
    await world.announce(other, THEIRS.worker_id)
    await world.announce(sharing, 6, model_name="another")
    await world.announce(sharing, 7, blocksets={0: {"worker_id": 7}})
    await world.until(epochs={}, refused=["bytes", "fingerprint", "worker_id"])
    assert world.peers.imports.refusals == 3
    sharing.close(60)
    other.close(60)
