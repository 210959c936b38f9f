"""A slower tier: what comes out is what went in, or nothing does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_agent.blocks.changes import BlockRemoved, BlockStored
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.storage.disk import DiskStorage
from worker_agent.storage.journal import SlotJournal
from worker_agent.storage.memory import host_memory
from worker_agent.transfer.slots import DiskSlots, MemorySlots
from worker_agent.transfer.stored_tier import StoredTier

BLOCK_BYTES = 1000
NUM_SLOTS = 6


def name(number):
    return BlockName(number.to_bytes(16, "little"), number)


def identities(*numbers):
    return [name(number).identity for number in numbers]


def rows(*numbers):
    """The bytes of blocks, each of its number."""
    return torch.stack(
        [(torch.arange(BLOCK_BYTES) * (n + 1) % 251).to(torch.uint8) for n in numbers]
        or [torch.empty(0, dtype=torch.uint8)]
    )


def pool_of(num_slots=NUM_SLOTS):
    return BlockPool(num_slots, LineageEviction())


def in_memory():
    return StoredTier(pool_of(), MemorySlots(host_memory(NUM_SLOTS * BLOCK_BYTES), NUM_SLOTS))


class OnDisk:
    """A tier in a file with a journal, which may be left behind and found again."""

    def __init__(self, directory):
        self.disk = DiskStorage(directory / "blocks", NUM_SLOTS, BLOCK_BYTES)
        self.journal = SlotJournal(directory / "journal", NUM_SLOTS, fingerprint=1)
        slots = DiskSlots(self.disk, BLOCK_BYTES, batch=2)
        self.tier = StoredTier(pool_of(), slots, self.journal)

    def __enter__(self):
        return self.tier

    def __exit__(self, *_):
        self.disk.close()
        self.journal.close()


@pytest.fixture(params=["memory", "disk"])
def tier(request, tmp_path):
    if request.param == "memory":
        yield in_memory()
    else:
        with OnDisk(tmp_path) as tier:
            yield tier


def store(tier, *numbers):
    return tier.store([name(number) for number in numbers], rows(*numbers))


def load(tier, *numbers):
    """How many came, all of them right."""
    room = torch.zeros((len(numbers), BLOCK_BYTES), dtype=torch.uint8)
    count = tier.load(identities(*numbers), room)
    assert torch.equal(room[:count], rows(*numbers)[:count]) or not count
    return count


def test_what_is_stored_is_loaded(tier):
    assert store(tier, 1, 2, 3) == [True] * 3
    assert load(tier, 1, 2, 3, 4) == 3
    assert load(tier, 2, 9, 3) == 1
    assert load(tier, 9) == 0
    assert tier.pool.used_blocks == 0
    assert (tier.counters.stored, tier.counters.loaded) == (3, 4)


def test_what_is_there_is_not_stored_again(tier):
    store(tier, 1, 2)
    assert store(tier, 2, 3, 1) == [True] * 3
    assert tier.counters.stored == 3
    stored = [change.name.sequence_hash for change in tier.pool.take_changes()]
    assert stored == [1, 2, 3]


def test_the_leading_blocks_fit(tier):
    held = tier.pool.allocate(4)
    assert store(tier, 1, 2, 3) == [True, True, False]
    assert tier.counters.full == 1
    tier.pool.release(held)
    assert load(tier, 1, 2, 3) == 2


steps = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=4)),
    max_size=10,
)


@settings(max_examples=30)
@given(steps=steps, is_on_disk=st.booleans())
def test_never_a_wrong_byte(tmp_path_factory, steps, is_on_disk):
    on_disk = OnDisk(tmp_path_factory.mktemp("tier")) if is_on_disk else None
    tier = on_disk.tier if on_disk else in_memory()
    for is_store, numbers in steps:
        if is_store:
            assert all(store(tier, *numbers))
        else:
            assert load(tier, *numbers) == tier.pool.matching(identities(*numbers))
        tier.pool.check_invariants()
        assert tier.pool.used_blocks == 0
    if on_disk:
        on_disk.__exit__()


def flip(path, slot):
    """A bit of a slot's bytes."""
    with path.open("r+b") as file:
        file.seek(slot * 4096 + 500)
        byte = file.read(1)[0]
        file.seek(slot * 4096 + 500)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_never_handed_out(tmp_path):
    with OnDisk(tmp_path) as tier:
        store(tier, 1, 2, 3)
        tier.pool.take_changes()
        flip(tmp_path / "blocks", tier.pool.scan(identities(2))[0])
        assert load(tier, 1, 2, 3) == 1
        assert tier.pool.take_changes() == [BlockRemoved(name(2))]
        assert tier.counters.corrupt == 1
        store(tier, 2)
        assert load(tier, 1, 2, 3) == 3


def test_a_disk_that_fails_is_a_shorter_prefix(tmp_path):
    with OnDisk(tmp_path) as tier:
        store(tier, 1, 2, 3)
        slot = tier.pool.scan(identities(2))[0]
        os.truncate(tmp_path / "blocks", slot * 4096)
        assert load(tier, 1, 2, 3) == 1
        assert tier.counters.failed == 1
        tier.pool.check_invariants()


def test_a_later_life_takes_over_what_is_right(tmp_path):
    with OnDisk(tmp_path) as first:
        store(first, 1, 2, 3)
        flip(tmp_path / "blocks", first.pool.scan(identities(3))[0])
    with OnDisk(tmp_path) as second:
        assert second.adopt(rows(0)) == 2
        assert second.pool.take_changes() == [BlockStored(name(1)), BlockStored(name(2))]
        assert load(second, 1, 2, 3) == 2
        assert (second.counters.adopted, second.counters.corrupt) == (2, 1)
        second.pool.check_invariants()
    with OnDisk(tmp_path) as third:
        assert third.adopt(rows(0)) == 2
        assert third.counters.corrupt == 0


def test_one_killed_at_any_moment_leaves_nothing_wrong(tmp_path):
    """A process that stores without end, killed; what it left is right, or is not there."""
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; import itertools\n"
        "from test_stored_tier import OnDisk, store\n"
        "tier = OnDisk(Path(sys.argv[1])).tier\n"
        "for n in itertools.count():\n"
        "    store(tier, n % 90, n % 90 + 100)\n"
        "    if n == 20: print('storing', flush=True)\n"
    )
    here = str(Path(__file__).parent)
    arguments = [sys.executable, "-c", script, str(tmp_path), here, *sys.path]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"storing\n"
        process.kill()
    with OnDisk(tmp_path) as tier:
        adopted = tier.adopt(rows(0))
        assert NUM_SLOTS - 2 <= adopted <= NUM_SLOTS
        kept = [change.name.sequence_hash for change in tier.pool.take_changes()]
        assert all(load(tier, number) == 1 for number in kept)
