"""Blocks that one rank pushes into another's host memory while it computes them."""

import socket

import pytest
import torch
from msgspec.structs import replace

from router.protocol.values import Rank, Tier
from support.blocks.sharing_process import MODEL, Bytes, config_of, shared
from support.fleets.peering import changing, sealed
from support.processes.servers import eventually, until
from worker_agent.blocks.names import BlockName
from worker_agent.manager.manager import KvBlockManager
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.pushing import Pushed, Pushes, Steps, reservation
from worker_agent.transfer.plan import BlockResult

FINGERPRINT = MODEL.fingerprint
SOURCE, TARGET = Rank(1338, 0), Rank(1337, 0)


def names_of(*numbers):
    return [BlockName(number.to_bytes(16, "little"), number) for number in numbers]


def identities(names):
    return [name.identity for name in names]


class Pair:
    """Worker 1338 pushes to worker 1337, which has 16 blocks of host memory."""

    def __init__(self, target, source):
        self.now_s = [0.0]
        self.target, self.source = target, source
        self.receiving = shared(target, clock=lambda: self.now_s[0])
        self.sending = shared(source)
        self.sending.import_remote_blockset(self.receiving.export_local_blockset())
        self.client = self.sending.client(1337, self.receiving.addresses, 10.0)

    def reserved(self, names, client=None):
        """Raises BlocksetError."""
        answer = (client or self.client).reserve(names, FINGERPRINT)
        return reservation(self.sending, names, TARGET, answer)

    def put(self, reserved, numbers):
        """Write these blocks of ours, each with the bytes of its number."""
        with self.source.host().allocate(len(numbers)) as blocks:
            for block, number in zip(blocks.block_ids, numbers, strict=True):
                Bytes(self.source, self.source.host()).fill([block], number)
            return self.sending.put(blocks, reserved, self.client)

    def there(self, names):
        """The digests of named blocks in the target's host memory."""
        with self.target.host().match(identities(names)) as blocks:
            return Bytes(self.target, self.target.host()).digests(blocks.block_ids)

    def expected(self, *numbers):
        with self.source.host().allocate(1) as block:
            bytes_of = Bytes(self.source, self.source.host())
            digests = []
            for number in numbers:
                bytes_of.fill(block.block_ids, number)
                digests += bytes_of.digests(block.block_ids)
            return digests

    @property
    def free_blocks(self):
        return self.target.host().pool.available_blocks

    def close(self):
        self.client.close()
        self.sending.close(60)
        self.receiving.close(60)


@pytest.fixture
def pair():
    with KvBlockManager(config_of(1337)) as target, KvBlockManager(config_of(1338)) as source:
        pair = Pair(target, source)
        yield pair
        pair.close()


def rule(call, *arguments):
    with pytest.raises(BlocksetError) as refused:
        call(*arguments)
    return refused.value.rule


def test_written_blocks_are_readable_once_they_are_named(pair):
    names = names_of(1, 2, 3)
    reserved = pair.reserved(names)
    assert (reserved.names, reserved.is_whole) == (names, True)
    assert pair.receiving.pushes == (1, 3)
    assert pair.put(reserved.targets, [1, 2, 3]) == [BlockResult.DONE] * 3
    assert pair.there(names) == []
    with pair.source.host().allocate(3) as room:
        assert rule(pair.sending.get, reserved.targets, room) == "not_readable"
    assert pair.client.complete(reserved.targets.listed.lease) == 3
    assert pair.there(names) == pair.expected(1, 2, 3)
    assert (pair.receiving.pushes, pair.free_blocks) == ((0, 0), 16)
    changes = pair.target.stack.poll(0.0)
    assert [each.change.name for each in changes] == names
    store = pair.target.stack.store_of(changes[0].tier)
    with pair.target.host().match(identities(names)) as blocks:
        checksums = zip(blocks.block_ids, names, strict=True)
        assert all(store.proof(block, name.identity) for block, name in checksums)
    assert pair.reserved(names) is None


def test_only_the_leading_written_blocks_are_named(pair):
    names = names_of(1, 2, 3, 4)
    reserved = pair.reserved(names)
    first, second, _, last = reserved.targets.listed.block_indices
    for index, number in ((first, 1), (last, 4), (second, 2)):
        pair.put(_only(reserved.targets, [index]), [number])
    assert pair.client.complete(reserved.targets.listed.lease) == 2
    assert pair.there(names) == pair.expected(1, 2)
    assert pair.free_blocks == 16


def _only(targets, indices):

    return replace(targets, listed=replace(targets.listed, block_indices=tuple(indices)))


def test_blocks_that_are_there_are_not_pushed(pair):
    with pair.target.host().allocate(2) as blocks:
        blocks.register(names_of(1, 3)).release()
    reserved = pair.reserved(names_of(1, 2, 3, 4))
    assert (reserved.names, reserved.is_whole) == (names_of(2, 4), True)


def test_block_stored_meanwhile_stays_as_it_is(pair):
    reserved = pair.reserved(names_of(1, 2))
    pair.put(reserved.targets, [1, 2])
    own = pair.target.host().allocate(1)
    Bytes(pair.target, pair.target.host()).fill(own.block_ids, 9)
    own.register(names_of(2)).release()
    assert pair.client.complete(reserved.targets.listed.lease) == 2
    assert pair.there(names_of(1, 2)) == pair.expected(1, 9)
    assert pair.free_blocks == 16


def test_peers_get_a_part_of_the_memory_and_the_last_blocks_are_kept(pair):
    """Of 16 blocks, 4 for a peer, 8 for all, and none of the last 4."""
    first = pair.reserved(names_of(*range(1, 9)))
    assert (len(first.names), first.is_whole) == (4, False)
    assert rule(pair.reserved, names_of(20)) == "too_many"
    clients = [pair.sending.client(1337, pair.receiving.addresses, 10.0) for _ in range(2)]
    assert len(pair.reserved(names_of(*range(20, 26)), clients[0]).names) == 4
    assert rule(pair.reserved, names_of(30), clients[1]) == "too_many"
    counters = pair.receiving.receiver.counters
    assert (counters.refused, counters.cut) == (2, 2)
    pair.client.end(first.targets.listed)
    held = pair.target.host().allocate(7)
    assert len(pair.reserved(names_of(40, 41), clients[1]).names) == 1
    assert rule(pair.reserved, names_of(50), clients[1]) == "no_room"
    held.release()
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    ("names", "fingerprint", "why"),
    [
        (names_of(1), FINGERPRINT + 1, "other_model"),
        (names_of(1, 1), FINGERPRINT, "invalid_names"),
        (names_of(*range(4097)), FINGERPRINT, "invalid_names"),
    ],
)
def test_unsuitable_push_is_refused(pair, names, fingerprint, why):
    assert rule(pair.client.reserve, names, fingerprint) == why
    assert (pair.receiving.pushes, pair.receiving.receiver.counters.refused) == ((0, 0), 1)


def test_pushes_of_a_connection_are_limited():
    room = replace(config_of(1337).host, num_blocks=160)
    with (
        KvBlockManager(replace(config_of(1337), host=room)) as target,
        KvBlockManager(config_of(1338)) as source,
    ):
        pair = Pair(target, source)
        for number in range(32):
            pair.reserved(names_of(number))
        assert rule(pair.reserved, names_of(32)) == "too_many_pushes"
        assert pair.receiving.pushes == (32, 32)
        pair.close()


def test_block_that_is_written_again_has_its_last_bytes(pair):
    reserved = pair.reserved(names_of(1))
    for number in (7, 1):
        pair.put(reserved.targets, [number])
    assert pair.client.complete(reserved.targets.listed.lease) == 1
    store = pair.target.stack.store_of(Tier.HOST)
    rows = torch.empty((1, 768), dtype=torch.uint8)
    assert store.load(identities(names_of(1)), rows) == [BlockResult.DONE]
    assert pair.there(names_of(1)) == pair.expected(1)


def test_worker_without_host_memory_takes_no_blocks(pair):
    bare = config_of(1340)

    with KvBlockManager(replace(bare, host=None)) as manager:
        sharing = shared(manager)
        client = pair.sending.client(1340, sharing.addresses, 10.0)
        assert rule(client.reserve, names_of(1), FINGERPRINT) == "no_receiver"
        client.close()
        sharing.close(60)


def test_blocks_of_another_epoch_or_rank_are_not_written(pair):
    answer = pair.client.reserve(names_of(1), FINGERPRINT)
    assert rule(reservation, pair.sending, names_of(1), Rank(1337, 1), answer) == "other_blocks"
    pair.sending.forget(TARGET)
    assert rule(reservation, pair.sending, names_of(1), TARGET, answer) == "unknown_worker"


def test_late_put_writes_nowhere(pair):
    """Its lease has ended, and its slots may have other blocks by now."""
    reserved = pair.reserved(names_of(1, 2))
    pair.put(_only(reserved.targets, reserved.targets.listed.block_indices[:1]), [1])
    pair.now_s[0] = 10.0
    assert rule(pair.put, reserved.targets, [1, 2]) == "lease_expired"
    assert rule(pair.client.complete, reserved.targets.listed.lease) == "lease_expired"
    assert pair.receiving.tick() == 1
    with pair.target.host().allocate(16) as all_blocks:
        bytes_of = Bytes(pair.target, pair.target.host())
        bytes_of.fill(all_blocks.block_ids, 7)
        before = bytes_of.digests(all_blocks.block_ids)
        assert rule(pair.put, reserved.targets, [1, 2]) == "lease_unknown"
        assert bytes_of.digests(all_blocks.block_ids) == before


def test_each_new_block_extends_a_push_and_old_ones_do_not(pair):
    reserved = pair.reserved(names_of(1, 2))
    first, second = reserved.targets.listed.block_indices
    pair.now_s[0] = 6.0
    pair.put(_only(reserved.targets, [first]), [1])
    pair.now_s[0] = 12.0
    pair.put(_only(reserved.targets, [first]), [1])
    assert pair.receiving.tick() == 0
    pair.now_s[0] = 16.0
    assert pair.receiving.tick() == 1
    assert rule(pair.put, _only(reserved.targets, [second]), [2]) == "lease_unknown"


def test_end_of_a_connection_ends_its_pushes_alone(pair):
    other = pair.sending.client(1337, pair.receiving.addresses, 10.0)
    pair.reserved(names_of(1, 2))
    kept = pair.reserved(names_of(3), other)
    pair.client.close()
    until(lambda: pair.receiving.pushes == (1, 1))
    assert pair.receiving.lease_counters.abandoned == 1
    assert pair.free_blocks == 15
    pair.put(kept.targets, [3])  # over a third connection: the lease alone counts
    assert other.complete(kept.targets.listed.lease) == 1
    other.close()


@pytest.mark.parametrize("is_forged", [False, True])
def test_bytes_changed_on_the_way_are_never_named(pair, is_forged):
    """By one who also corrects the checksum."""
    bytes_1 = bytes((1 + i) % 256 for i in range(768))
    forged = b"x" * len(bytes_1) if is_forged else bytes_1
    names, direct = names_of(1, 2), pair.client
    with changing(pair.receiving.addresses[0], sealed(bytes_1), sealed(forged)) as address:
        pair.client = pair.sending.client(1337, [address], 10.0)
        reserved = pair.reserved(names)
        outcome = BlockResult.FAILED if is_forged else BlockResult.DONE
        assert pair.put(reserved.targets, [1, 2]) == [outcome] * 2
        if is_forged:
            until(lambda: pair.receiving.pushes == (0, 0))
        else:
            assert pair.client.complete(reserved.targets.listed.lease) == 2
        pair.client.close()
    direct.close()
    assert pair.there(names) == pair.expected(1, 2) * (not is_forged)
    assert pair.free_blocks == 16


# ── The pusher ──────────────────────────────────────────────────────────────────────────────────


class Engine:
    """Computes the blocks of worker 1338's device, when it is told to."""

    def __init__(self, pair, timeout_s=10.0):
        self.device = pair.source.device()
        self.pushes = Pushes(pair.sending, self.device, timeout_s)
        self.steps = Steps()
        self._bytes = Bytes(pair.source, self.device)
        self._pair = pair

    def compute(self, *numbers):
        blocks = self.device.allocate(len(numbers))
        for block, number in zip(blocks.block_ids, numbers, strict=True):
            self._bytes.fill([block], number)
        blocks.register(names_of(*numbers)).release()
        self.steps.note()

    def pushing(self, names, addresses=None):
        where = addresses or self._pair.receiving.addresses
        return self.pushes.push(TARGET, where, names, self.steps)


@pytest.fixture
def engine(pair):
    engine = Engine(pair)
    yield engine
    engine.pushes.close()


async def test_blocks_are_pushed_while_others_are_computed(pair, engine):
    names = names_of(1, 2, 3, 4)
    async with engine.pushing(names) as push:
        assert pair.receiving.pushes == (0, 0)  # a prompt that waits keeps no memory
        for number in (1, 2, 3):
            engine.compute(number)
            await eventually(lambda n=number: pair.receiving.counters.received_blocks == n)
        assert (pair.receiving.pushes, pair.there(names)) == ((1, 4), [])
        engine.compute(4)
        assert await push.finished(10.0) == Pushed(4, is_whole=True)
    assert pair.there(names) == pair.expected(1, 2, 3, 4)
    counters = engine.pushes.counters
    assert (counters.begun, counters.failed, counters.blocks) == (1, 0, 4)
    assert engine.device.pool.used_blocks == 0
    async with engine.pushing(names) as push:  # it has them
        assert await push.finished(10.0) == Pushed(0, is_whole=True)


async def test_prompt_that_is_given_up_ends_its_lease(pair, engine):
    async with engine.pushing(names_of(1, 2)):
        engine.compute(1)
        await eventually(lambda: pair.receiving.counters.received_blocks)
    await eventually(lambda: pair.receiving.pushes == (0, 0))
    assert (pair.there(names_of(1)), pair.free_blocks) == ([], 16)
    assert engine.pushes.counters.failed == 1


async def test_what_was_not_computed_is_not_awaited(pair, engine):
    async with engine.pushing(names_of(1, 2)) as push:
        engine.compute(1)
        assert await push.finished(10.0) == Pushed(1, is_whole=False)
    async with engine.pushing(names_of(8)) as push:
        assert await push.finished(10.0) == Pushed()


async def test_prompt_beyond_the_room_is_pushed_in_part(pair, engine):
    async with engine.pushing(names_of(*range(1, 7))) as push:
        engine.compute(*range(1, 7))
        assert await push.finished(10.0) == Pushed(4, is_whole=False)


async def test_lost_target_is_left_alone(pair, engine):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        engine = Engine(pair, timeout_s=0.2)
        for _ in range(2):
            async with engine.pushing(names_of(1), [address]) as push:
                engine.compute(1)
                assert await push.finished(10.0) == Pushed()
        silent.settimeout(0.0)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # the second was not even begun
            silent.accept()
    engine.pushes.close()
    assert engine.pushes.counters.failed == 2


async def test_late_target_is_not_awaited(pair, engine):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        engine.compute(1)
        async with engine.pushing(names_of(1), [address]) as push:
            assert await push.finished(0.05) == Pushed()
    assert engine.pushes.counters.failed == 1
