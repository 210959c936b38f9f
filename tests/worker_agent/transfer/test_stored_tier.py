"""A slower tier: what comes out is what went in, or nothing does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.blocks.failing_disks import BROKEN, FULL, in_place_of
from worker_agent.blocks.changes import BlockRemoved, BlockStored
from worker_agent.blocks.errors import PoolInUseError
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import PoolStatus, ResetOutcome
from worker_agent.storage.disk import DiskStorage
from worker_agent.storage.journal import SlotJournal
from worker_agent.storage.mapped_file import MappedFile
from worker_agent.storage.memory import host_memory, shared_memory
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.plan import ARRIVED, BlockResult
from worker_agent.transfer.slots import DiskSlots, MemorySlots
from worker_agent.transfer.stored_tier import StoredTier

DONE, KNOWN, MISSING = BlockResult.DONE, BlockResult.KNOWN, BlockResult.MISSING
FAILED, CORRUPT = BlockResult.FAILED, BlockResult.CORRUPT
BLOCK_BYTES = 1000
NUM_SLOTS = 6


def name(number):
    return BlockName(number.to_bytes(16, "little"), number)


def identities(*numbers):
    return [name(number).identity for number in numbers]


def rows(*numbers):
    """The bytes of blocks, each of its number."""
    numbered = [(torch.arange(BLOCK_BYTES) * (n + 1) % 251).to(torch.uint8) for n in numbers]
    return torch.stack(numbered) if numbered else torch.empty((0, BLOCK_BYTES), dtype=torch.uint8)


def pool_of(num_slots=NUM_SLOTS):
    return BlockPool(num_slots, LineageEviction())


def in_memory(check_every=1):
    slots = MemorySlots(host_memory(NUM_SLOTS * BLOCK_BYTES), NUM_SLOTS, batch_blocks=2)
    return StoredTier(pool_of(), slots, check_every=check_every)


class Kept:
    """A tier that outlives its process, which may be left behind and found again."""

    def __init__(self, directory, slots, **options):
        journal = SlotJournal(directory / "journal", NUM_SLOTS, fingerprint=1)
        self.tier = StoredTier(pool_of(), slots, journal, **options)

    def __enter__(self):
        return self.tier

    def __exit__(self, *_):
        self.tier.close()


def on_disk(directory, io=None):
    disk = DiskStorage(directory / "blocks", NUM_SLOTS, BLOCK_BYTES)
    return Kept(directory, DiskSlots(disk, BLOCK_BYTES, batch_blocks=2), io=io)


def on_disk_with_a_thread(directory):
    return on_disk(directory, IoThreads("disk", timeout_s=60, count=2))


def in_shared_memory(directory, **options):
    memory = shared_memory(MappedFile(directory / "blocks", NUM_SLOTS * BLOCK_BYTES))
    return Kept(directory, MemorySlots(memory, NUM_SLOTS), **options)


@pytest.fixture(params=["memory", "disk", "disk with a thread"])
def tier(request, tmp_path):
    if request.param == "memory":
        yield in_memory()
    else:
        make = on_disk_with_a_thread if "thread" in request.param else on_disk
        with make(tmp_path) as tier:
            yield tier


def store(tier, *numbers):
    return tier.store([name(number) for number in numbers], rows(*numbers))


def adopted(tier, room=None, until_s=float("inf")):
    """How many blocks, in slots that were never given out."""
    for _ in tier.adopt(rows(0) if room is None else room, until_s):
        tier.pool.check_invariants()
    return tier.counters.adopted


def load(tier, *numbers):
    """What became of each; all that came are right."""
    room = torch.zeros((len(numbers), BLOCK_BYTES), dtype=torch.uint8)
    outcomes = tier.load(identities(*numbers), room)
    for row, expected, outcome in zip(room, rows(*numbers), outcomes, strict=True):
        assert outcome is not DONE or torch.equal(row, expected)
    return outcomes


def test_stored_rows_are_loaded(tier):
    assert store(tier, 1, 2, 3) == [DONE] * 3
    assert load(tier, 1, 2, 3, 4) == [DONE, DONE, DONE, MISSING]
    assert load(tier, 2, 9, 3) == [DONE, MISSING, DONE]
    assert tier.pool.used_blocks == 0
    assert (tier.counters.stored, tier.counters.loaded) == (3, 5)


def test_known_block_is_not_stored_again(tier):
    store(tier, 1, 2)
    assert store(tier, 2, 3, 1) == [KNOWN, DONE, KNOWN]
    assert tier.counters.stored == 3
    stored = [change.name.sequence_hash for change in tier.pool.take_changes()]
    assert stored == [1, 2, 3]


def test_missing_extra_keys_are_none(tier):
    assert store(tier) == load(tier) == []


def test_only_leading_blocks_that_fit_are_stored(tier):
    held = tier.pool.allocate(4)
    assert store(tier, 1, 2, 3) == [DONE, DONE, BlockResult.FULL]
    assert tier.counters.full == 1
    tier.pool.release(held)
    assert load(tier, 1, 2, 3) == [DONE, DONE, MISSING]


def test_matching_blocks_are_not_evicted_by_the_same_store(tier):
    store(tier, 1, 2, 3, 4, 5, 6)
    assert store(tier, 1, 11, 12) == [KNOWN, DONE, DONE]
    assert load(tier, 1, 11, 12) == [DONE] * 3


def test_touched_blocks_stay_longer(tier):
    for number in range(1, 7):
        store(tier, number)
    tier.touch(identities(1, 9))
    store(tier, 7)
    assert load(tier, 1, 2, 3) == [DONE, MISSING, DONE]


def test_measurement_leaves_no_blocks(tier):
    store(tier, 1, 2)
    tier.take_changes()
    probe = tier.probe(rows(0, 0, 0, 0, 0, 0))
    assert min(probe.read_bytes_per_s, probe.write_bytes_per_s) > 0
    assert probe.latency_s >= 0
    assert (tier.status, tier.take_changes()) == (PoolStatus(0, 2, 4), [])
    assert load(tier, 1, 2) == [DONE, DONE]
    store(tier, 3, 4, 5, 6)
    assert tier.probe(rows(0)) is None  # nothing is pushed out for it


def test_invalid_transfer_is_refused(tier):
    with pytest.raises(TransferError, match="names: one twice"):
        store(tier, 1, 1)
    with pytest.raises(TransferError, match="rows: 1 \\(allowed: 2, one a block"):
        tier.load(identities(1, 2), rows(1))


steps = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=4)),
    max_size=10,
)


@settings(max_examples=30)
@given(steps=steps, make=st.sampled_from([None, on_disk, on_disk_with_a_thread]))
def test_random_operations_never_return_a_wrong_byte(tmp_path_factory, steps, make):
    kept = make(tmp_path_factory.mktemp("tier")) if make else None
    tier = kept.tier if kept else in_memory()
    for is_store, numbers in steps:
        if is_store:
            assert ARRIVED.issuperset(store(tier, *numbers))
        else:
            there = [block is not None for block in tier.pool.scan(identities(*numbers))]
            assert load(tier, *numbers) == [DONE if is_ else MISSING for is_ in there]
        tier.pool.check_invariants()
        assert tier.pool.used_blocks == 0
    if kept:
        kept.__exit__()


def flip(path, slot, stride_bytes=4096):
    """A bit of a slot's bytes."""
    with path.open("r+b") as file:
        file.seek(slot * stride_bytes + 500)
        byte = file.read(1)[0]
        file.seek(slot * stride_bytes + 500)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_never_handed_out(tmp_path):
    with on_disk(tmp_path) as tier:
        store(tier, 1, 2, 3)
        tier.take_changes()
        flip(tmp_path / "blocks", tier.pool.scan(identities(2))[0])
        assert load(tier, 1, 2, 3) == [DONE, CORRUPT, DONE]
        assert tier.take_changes() == [BlockRemoved(name(2))]
        assert tier.counters.corrupt == 1
        store(tier, 2)
        assert load(tier, 1, 2, 3) == [DONE] * 3


def test_corrupt_block_is_dropped_while_in_use(tmp_path):
    with on_disk(tmp_path) as tier:
        store(tier, 1)
        [used] = tier.pool.match(identities(1))
        flip(tmp_path / "blocks", used)
        assert load(tier, 1) == [CORRUPT]
        assert load(tier, 1) == [MISSING]
        tier.pool.release([used])
        tier.pool.check_invariants()


def test_memory_is_sampled(tmp_path):
    with in_shared_memory(tmp_path, check_every=3) as tier:
        store(tier, 1)
        flip(tmp_path / "blocks", tier.pool.scan(identities(1))[0], BLOCK_BYTES)
        room = rows(0)
        outcomes = [tier.load(identities(1), room, is_sampled=True)[0] for _ in range(4)]
        assert outcomes == [DONE, DONE, CORRUPT, MISSING]
        store(tier, 2)
        flip(tmp_path / "blocks", tier.pool.scan(identities(2))[0], BLOCK_BYTES)
        assert load(tier, 2) == [CORRUPT]  # on its way to another tier each is proven


def test_reused_slot_is_corrupt_with_or_without_sampling():
    tier = in_memory(check_every=1000)
    store(tier, 1)
    tier.remove(identities(1))
    for sampled in (True, False):
        blocks = tier.pool.allocate(NUM_SLOTS)
        tier.pool.release(tier.pool.register(blocks, [name(n) for n in range(2, 2 + NUM_SLOTS)]))
        room = rows(*range(NUM_SLOTS))
        outcomes = tier.load(identities(*range(2, 2 + NUM_SLOTS)), room, is_sampled=sampled)
        assert outcomes == [CORRUPT] * NUM_SLOTS


@pytest.mark.parametrize("device", [FULL, BROKEN])
def test_a_disk_that_fails_is_not_measured(tmp_path, device):
    with on_disk(tmp_path) as tier:
        with in_place_of(tmp_path / "blocks", device):
            assert tier.probe(rows(0, 0)) is None
        assert tier.pool.used_blocks == 0
        assert tier.probe(rows(0, 0)) is not None


def test_failing_disk_fails_each_block(tmp_path):
    with on_disk(tmp_path) as tier:
        store(tier, 1, 2, 3)
        slots = tier.pool.scan(identities(1, 2, 3))
        os.truncate(tmp_path / "blocks", max(slots) * 4096)
        outcomes = [FAILED if slot == max(slots) else DONE for slot in slots]
        assert load(tier, 1, 2, 3) == outcomes
        assert tier.counters.failed == 1
        tier.pool.check_invariants()


@pytest.mark.parametrize("make", [on_disk, on_disk_with_a_thread])
def test_a_full_disk_keeps_what_it_had(tmp_path, make):
    with make(tmp_path) as tier:
        store(tier, 1, 2)
        with in_place_of(tmp_path / "blocks", FULL):
            assert store(tier, 2, 3, 4) == [KNOWN, FAILED, FAILED]
        assert load(tier, 1, 2, 3) == [DONE, DONE, MISSING]
        assert (tier.counters.failed, tier.pool.used_blocks) == (2, 0)
        assert store(tier, 3) == [DONE]
        tier.pool.check_invariants()


@pytest.mark.parametrize("make", [on_disk, on_disk_with_a_thread])
def test_blocks_of_a_broken_disk_are_dropped(tmp_path, make):
    with make(tmp_path) as tier:
        store(tier, 1, 2)
        tier.take_changes()
        with in_place_of(tmp_path / "blocks", BROKEN):
            assert load(tier, 1, 2) == [FAILED, FAILED]
            assert store(tier, 3) == [FAILED]
        assert tier.take_changes() == [BlockRemoved(name(1)), BlockRemoved(name(2))]
        assert load(tier, 1, 2, 3) == [MISSING] * 3
        assert store(tier, 1) == [DONE]
    with make(tmp_path) as later:
        assert adopted(later) == 1


@pytest.mark.parametrize("make", [on_disk, on_disk_with_a_thread, in_shared_memory])
def test_later_life_adopts_intact_blocks(tmp_path, make):
    stride_bytes = BLOCK_BYTES if make is in_shared_memory else 4096
    with make(tmp_path) as first:
        store(first, 1, 2, 3, 4)
        flip(tmp_path / "blocks", first.pool.scan(identities(3))[0], stride_bytes)
        held = first.pool.match(identities(1))
        outcome = first.remove(identities(4, 9, 1))
        assert outcome == ResetOutcome(identities(4), identities(9), identities(1))
        with pytest.raises(PoolInUseError):
            first.reset()
        first.pool.release(held)
    with make(tmp_path) as second:
        assert adopted(second) == 2
        changes = sorted(second.take_changes(), key=lambda change: change.name.sequence_hash)
        assert changes == [BlockStored(name(1)), BlockStored(name(2))]
        assert load(second, 1, 2, 3) == [DONE, DONE, MISSING]
        assert (second.counters.adopted, second.counters.corrupt) == (2, 1)
        second.pool.check_invariants()
    with make(tmp_path) as third:
        assert adopted(third, rows(0, 0, 0)) == 2
        assert third.counters.corrupt == 0
        assert third.status == PoolStatus(0, 2, 4)
        (third.clear if make is on_disk else third.reset)()
    with make(tmp_path) as fourth:
        assert adopted(fourth) == 0


@pytest.mark.parametrize("make", [on_disk_with_a_thread, in_shared_memory])
def test_other_jobs_run_during_adoption(tmp_path, make):
    with make(tmp_path) as first:
        store(first, 1, 2, 3, 4)
    with make(tmp_path) as second:
        parts = second.adopt(rows(0), float("inf"))
        next(parts)
        assert load(second, 1, 2) == [DONE, MISSING]
        assert store(second, 5, 6, 7) == [DONE] * 3  # in two that were free, and the first
        second.clear()
        assert list(parts)
        assert second.counters.adopted == 1
        assert second.status == PoolStatus(0, 0, NUM_SLOTS)
        second.pool.check_invariants()


@pytest.mark.parametrize("make", [on_disk, on_disk_with_a_thread])
def test_unverified_blocks_are_left_to_a_later_life(tmp_path, make):
    with make(tmp_path) as first:
        store(first, 1, 2, 3)
    with make(tmp_path) as second:
        assert adopted(second, until_s=0.0) == 0
        assert (second.counters.unproven, second.status) == (3, PoolStatus(0, 0, NUM_SLOTS))
    with make(tmp_path) as third:
        with in_place_of(tmp_path / "blocks", BROKEN):
            assert adopted(third) == 0
        assert (third.counters.unproven, third.counters.corrupt) == (3, 0)
        store(third, 4, 5, 6, 7)  # one slot too few without those
    with make(tmp_path) as fourth:
        assert adopted(fourth) == 4 + 2


def test_process_killed_at_any_moment_leaves_no_corrupt_block(tmp_path):
    """A process that stores without end, killed; what it left is right, or is not there."""
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; import itertools\n"
        "from test_stored_tier import both_left_behind, store\n"
        "tiers = [kept.tier for kept in both_left_behind(Path(sys.argv[1]))]\n"
        "for n in itertools.count():\n"
        "    store(tiers[n % 2], n % 90, n % 90 + 100)\n"
        "    if n == 20: print('storing', flush=True)\n"
    )
    here = str(Path(__file__).parent)
    arguments = [sys.executable, "-c", script, str(tmp_path), here, *sys.path]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"storing\n"
        process.kill()
    for kept in both_left_behind(tmp_path):
        with kept as tier:
            assert NUM_SLOTS - 2 <= adopted(tier) <= NUM_SLOTS
            names = [change.name.sequence_hash for change in tier.take_changes()]
            assert all(load(tier, number) == [DONE] for number in names)


def both_left_behind(directory):
    """A file and shared memory, which outlive their process."""
    for kind in ("disk", "memory"):
        (directory / kind).mkdir(exist_ok=True)
    return on_disk_with_a_thread(directory / "disk"), in_shared_memory(directory / "memory")
