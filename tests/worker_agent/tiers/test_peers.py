"""Blocks of other workers come up like those of a tier: between disks and what all share."""

import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from router.protocol.values import Rank, Tier
from support.blocks.tier_stacks import host, level
from support.fleets import peering
from support.fleets.peering import HOST, Worker, content, identities, name
from support.processes.servers import eventually, free_port
from worker_agent.blocks.descriptors import PeerSource
from worker_agent.sharing import peer_server
from worker_agent.sharing.blockset import BlocksetExport, decode
from worker_agent.sharing.pause import LEFT_ALONE_S
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.sharing.peer_tier import PeerTier
from worker_agent.tiers import peers
from worker_agent.tiers.level import StackSettings
from worker_agent.tiers.onboarding import Load
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.plan import BlockResult

BLOCK_BYTES = peering.config_of(1).block_bytes
PATIENCE_S = 60.0


class Pulling:
    """A stack that pulls; time is what the test says."""

    def __init__(self, *levels, batch_blocks=2, block_bytes=BLOCK_BYTES, wrap=lambda tier: tier):
        settings = StackSettings(block_bytes, batch_blocks=batch_blocks)
        self.stack = TierStack(levels, settings)
        self.connected = []
        self._wrap = wrap
        self.stack.connect_peers(self._connect)

    def _connect(self, rank, addresses):
        self.connected.append((rank, addresses))
        client = PeerClient(addresses[0], rank.worker_id, peering.TOKEN)
        return self._wrap(PeerTier(f"worker {rank}", client))

    def load(self, source, *numbers):
        loading = self.stack.load(identities(*numbers), 0.0, PATIENCE_S, source=source)
        while loading is not None and not loading.is_done:
            self.stack.poll(0.0)
        return loading


@contextmanager
def pulling(*levels, **options):
    each = Pulling(*levels, **options)
    yield each
    assert each.stack.close(60)


def source_of(owner, blocks):
    return PeerSource(Rank(owner.worker_id, 0), owner.server.addresses, blocks)


@pytest.fixture
def owner():
    with Worker(1337) as owner:
        yield owner


def right(loading, *numbers):
    rows = loading.rows[: len(numbers)]
    return [bytes(row.numpy().data) for row in rows] == [content(number) for number in numbers]


def leased(owner, numbers, until_s=peering.FOREVER_S):
    handle = owner.keep(HOST, numbers)
    listed = owner.leases.grant(handle, HOST, f"{numbers}", until_s)
    return replace(source_of(owner, len(numbers)), leased=listed)


async def test_leased_blocks_are_read_under_their_lease_which_then_ends(owner):
    source = leased(owner, [1, 2, 3, 4])
    with pulling() as here:
        part = here.load(source.behind(1), 2, 3)
        assert (part.usable_blocks, right(part, 2, 3)) == (2, True)
        assert (owner.server.counters.leased_gets, len(owner.leases)) == (1, 0)
    source = leased(owner, [5, 6])
    with pulling() as here:
        assert right(here.load(source, 5, 6), 5, 6)
        assert (owner.leases.counters.ended, len(owner.leases)) == (2, 0)


async def test_without_a_usable_lease_blocks_are_read_by_name(owner):
    expired, other = leased(owner, [1, 2], until_s=0.0), leased(owner, [3, 4])
    with pulling() as here:
        assert right(here.load(expired, 1, 2), 1, 2)
        assert right(here.load(other, 2, 1), 2, 1)
    assert owner.server.counters.leased_gets == 0
    assert owner.server.counters.refused == 2


async def test_blocks_of_a_peer_come_from_its_device_and_host(owner):
    kept = owner.keep(HOST, [1, 2, 4]), owner.keep(peering.DEVICE, [3, 5])
    before = [each.tier.status for each in kept]
    with pulling() as here:
        loading = here.load(source_of(owner, 5), 1, 2, 3, 4, 5)
        assert loading.usable_blocks == 5
        assert right(loading, 1, 2, 3, 4, 5)
        assert here.stack.pulled.blocks == 5
    await eventually(lambda: owner.server.counters.sent_blocks == 5)  # counted behind the last byte
    assert [each.tier.status for each in kept] == before


def test_load_is_limited_to_the_announced_blocks(owner):
    owner.keep(HOST, [1, 2, 3])
    with pulling() as here:
        assert here.load(source_of(owner, 2), 1, 2, 3).usable_blocks == 2
        assert here.load(source_of(owner, 0), 1, 2, 3) is None
        assert here.load(None, 1) is None


def test_a_hint_that_is_old_ends_at_the_first_block_that_is_gone(owner):
    owner.keep(HOST, [1, 3])
    with pulling(batch_blocks=8) as here:
        loading = here.load(source_of(owner, 3), 1, 2, 3)
        assert (loading.usable_blocks, loading.outcomes[1]) == (1, Load.LOST)


def test_blocks_in_own_tiers_are_not_requested(owner, tmp_path):
    owner.keep(HOST, [1, 2])
    with pulling(level(Tier.HOST, host(tmp_path, 4, BLOCK_BYTES))) as here:
        row = torch.frombuffer(bytearray(content(1)), dtype=torch.uint8).reshape(1, -1)
        here.stack.call(Tier.HOST, lambda tier: tier.store([name(1)], row)).result(60)
        here.stack.poll(0.0)
        loading = here.load(source_of(owner, 2), 1, 2)
        assert right(loading, 1, 2)
        assert here.stack.pulled.blocks == 1


def unreachable(port, now_s):
    """The tier of a peer that does not listen yet, with a clock; and memory for one block."""
    client = PeerClient(f"tcp://127.0.0.1:{port}", 1337, peering.TOKEN)
    rows = torch.empty((1, BLOCK_BYTES), dtype=torch.uint8)
    return PeerTier("worker 1337.0", client, lambda: now_s[0]), rows


def test_unreachable_peer_is_skipped_for_a_while():
    now_s, port = [0.0], free_port()
    tier, rows = unreachable(port, now_s)
    assert tier.load(identities(1), rows) == [BlockResult.FAILED]
    with Worker(1337, port=port) as owner:
        owner.keep(HOST, [1])
        assert tier.load(identities(1), rows) == [BlockResult.FAILED]
        now_s[0] += LEFT_ALONE_S
        assert tier.load(identities(1), rows) == [BlockResult.DONE]
        tier.close()


def test_pause_doubles_while_a_peer_fails():
    now_s, port = [0.0], free_port()
    tier, rows = unreachable(port, now_s)
    pauses_s = [LEFT_ALONE_S, 2 * LEFT_ALONE_S]
    for pause_s in pauses_s:
        assert tier.load(identities(1), rows) == [BlockResult.FAILED]
        now_s[0] += pause_s
    with Worker(1337, port=port) as owner:
        owner.keep(HOST, [1])
        assert tier.load(identities(1), rows) == [BlockResult.DONE]
        owner.server.close(60)
        assert tier.load(identities(1), rows) == [BlockResult.FAILED]
    with Worker(1337, port=port) as owner:
        owner.keep(HOST, [1])
        assert tier.load(identities(1), rows) == [BlockResult.FAILED]
        now_s[0] += LEFT_ALONE_S
        assert tier.load(identities(1), rows) == [BlockResult.DONE]
    tier.close()


def test_peer_with_another_secret_gives_no_blocks(owner):
    client = PeerClient(owner.server.addresses[0], 1337, b"of another deployment")
    tier = PeerTier("worker 1337.0", client)
    rows = torch.empty((2, BLOCK_BYTES), dtype=torch.uint8)
    assert tier.load(identities(1, 2), rows) == [BlockResult.FAILED] * 2
    assert tier.counters.failed == 2
    tier.close()


@pytest.mark.parametrize(("spoilt", "usable_blocks"), [(0, 2), (1, 1)])
def test_corrupted_peer_blocks_are_not_taken(spoilt, usable_blocks):
    noted = {identities(n)[0]: xxh3_64_intdigest(content(n)) for n in (1, 2)}
    noted[identities(2)[0]] ^= spoilt
    with Worker(1337, proof=lambda _, identity: noted[identity]) as owner, pulling() as here:
        owner.keep(HOST, [1, 2])
        assert here.load(source_of(owner, 2), 1, 2).usable_blocks == usable_blocks
        assert here.stack.pulled.failed == spoilt


def test_more_than_may_be_asked_for_at_once_is_refused(owner, monkeypatch):
    monkeypatch.setattr(peer_server, "MAX_NAMED_BLOCKS", 1)
    owner.keep(HOST, [1, 2])
    with pulling(batch_blocks=2) as here:
        assert here.load(source_of(owner, 2), 1, 2).usable_blocks == 0


def test_moved_peer_is_reconnected_and_connections_are_bounded(owner, monkeypatch):
    monkeypatch.setattr(peers, "MAX_PEERS", 1)
    owner.keep(HOST, [1])
    with pulling() as here, Worker(1337) as again, Worker(1338) as third:
        again.keep(HOST, [1])
        third.keep(HOST, [1])
        for each in (owner, owner, again, third, again):
            assert here.load(source_of(each, 1), 1).usable_blocks == 1
        assert len(here.connected) == 4


def test_killed_peer_delivers_a_prefix_and_fails_the_rest():
    """Block by block: what had come is right, the rest is reported as lost, in time."""
    here = Path(peering.__file__)
    environment = {"PYTHONPATH": ":".join([str(here.parents[3]), *sys.path])}
    arguments = [sys.executable, str(here), "1337", "16"]
    process = subprocess.Popen(arguments, stdin=-1, stdout=-1, text=True, env=environment)
    try:
        export = decode(process.stdout.readline().encode(), BlocksetExport)
        source = PeerSource(Rank(1337, 0), export.addresses, 2)
        with pulling(batch_blocks=1, wrap=partial(_KillingAfterOne, process)) as pull:
            loading = pull.load(source, 7, 8)
            assert loading.outcomes == [Load.LOADED, Load.LOST]
            assert right(loading, 7)
            assert pull.stack.pulled.failed == 1
    finally:
        process.kill()
        process.communicate()


class _KillingAfterOne:
    """Gives blocks once; then their holder dies."""

    def __init__(self, process, tier):
        self._tier = tier
        self._process = process
        self._calls = 0

    def load(self, identities, rows, *, is_sampled=False):
        self._calls += 1
        if self._calls == 2:
            self._process.kill()
            self._process.wait(60)
        return self._tier.load(identities, rows, is_sampled=is_sampled)

    def take_changes(self):
        return []

    def close(self):
        self._tier.close()
