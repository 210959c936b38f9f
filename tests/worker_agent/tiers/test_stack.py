"""Tiers put together: blocks come up as they went down, or not at all, and no caller waits."""

import os
import threading

import pytest
import torch

from router.protocol.values import Tier
from support.blocks.failing_disks import BROKEN, in_place_of
from support.blocks.tier_stacks import (
    BLOCK_BYTES,
    FOREVER_S,
    Stacked,
    disk,
    host,
    identities,
    name,
    rows,
)
from worker_agent.blocks.changes import BlockRemoved, BlockStored
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.pool import BlockPool
from worker_agent.offload.load_or_recompute import LoadOrRecompute
from worker_agent.offload.policies import MinPriorityPrefix, policy_of
from worker_agent.storage.errors import StorageError
from worker_agent.storage.memory import host_memory
from worker_agent.tiers.level import Level
from worker_agent.tiers.onboarding import TRIED_EVERY, Load
from worker_agent.tiers.stack import TierChange
from worker_agent.transfer.slots import MemorySlots
from worker_agent.transfer.stored_tier import StoredTier

HOST, DISK = Tier.HOST, Tier.DISK


@pytest.fixture
def both(tmp_path):
    with Stacked(host(tmp_path, 8), disk(tmp_path, 40)) as stacked:
        yield stacked


def flip(path, offset):
    """A bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_offered_blocks_reach_the_last_tier(both):
    both.offer(*range(6))
    assert all(both.holds(HOST, *range(6)) + both.holds(DISK, *range(6)))
    assert both.changes[:1] == [TierChange(HOST, BlockStored(name(0)))]
    assert both.load(*range(7)) == 6
    host_status, disk_status = both.stack.status()
    assert (host_status.held_blocks, host_status.down.blocks, host_status.up.blocks) == (6, 6, 6)
    assert (disk_status.held_blocks, disk_status.down.blocks, disk_status.up.blocks) == (6, 6, 0)
    assert disk_status.down.bytes == 6000


def test_a_prompt_comes_from_several_tiers(both):
    both.offer(*range(20))
    assert [bool(both.stack.held(each)) for each in identities(19, 20)] == [True, False]
    assert sum(both.holds(HOST, *range(20))) == 8
    assert both.load(*range(20)) == 20
    host_status, disk_status = both.stack.status()
    assert (host_status.up.blocks, disk_status.up.blocks) == (8, 12)
    assert both.load(30) == 0
    assert both.load(0, 1, 30, 2) == 2


def test_blocks_lost_by_one_tier_come_from_the_next(both, tmp_path):
    both.offer(*range(6))
    for slot in range(6):
        flip(tmp_path / "host", slot * 1000 + 500)
    assert both.load(*range(6)) == 6
    assert not any(both.holds(HOST, 0, 3))
    assert TierChange(HOST, BlockRemoved(name(0))) in both.changes


def test_corrupt_blocks_in_every_tier_shorten_the_prefix(both, tmp_path):
    both.offer(*range(6))
    both.on(HOST, lambda store: store.clear())
    slot = both.on(DISK, lambda store: store.pool.scan(identities(4))[0])
    flip(tmp_path / "disk", slot * 4096 + 500)
    assert both.load(*range(6), is_whole=True) == 0
    assert both.load(*range(6)) == 4
    assert both.holds(DISK, 3, 4, 5) == [True, False, True]
    assert both.stack.status()[1].store.corrupt == 1
    os.truncate(tmp_path / "disk", 0)
    assert both.load(*range(6)) == 0


def test_outcomes_are_per_block(both):
    both.offer(0, 1, 2, 3)
    both.on(HOST, lambda store: store.clear())
    both.on(DISK, lambda store: store.pool.reset_blocks(identities(2)))
    loading = both.stack.load(identities(0, 1), both.now_s, FOREVER_S)
    loading.cancel()
    assert (loading.is_done, loading.usable_blocks) == (True, 0)
    assert loading.outcomes == [Load.CANCELLED] * 2
    assert both.load(0, 1, 2, 3) == 2


class Stuck:
    """A tier whose thread waits until it is let go."""

    def __init__(self, stacked, tier):
        self.free, self.is_stuck = threading.Event(), threading.Event()
        stacked.stack.call(tier, self.wait)
        assert self.is_stuck.wait(60)

    def wait(self, _):
        self.is_stuck.set()
        self.free.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free.set()


def test_late_load_is_computed_without_harm(tmp_path):
    with Stacked(host(tmp_path, 8), disk(tmp_path, 40)) as both:
        both.offer(*range(12))
        with Stuck(both, DISK):
            loading = both.stack.load(identities(*range(12)), both.now_s, 5.0)
            both.stack.call(HOST, lambda _: None).result(60)
            both.poll()
            assert not loading.is_done
            assert 0 < both.stack.wait_s(both.now_s) < 5.0
            both.now_s += 5.0
            both.poll()
            came = loading.usable_blocks
            assert (loading.is_done, came) == (True, both.holds(HOST, *range(12)).index(False))
            assert loading.outcomes == [Load.LOADED] * came + [Load.LATE] * (12 - came)
        both.settle()
        assert loading.usable_blocks == came
        assert torch.equal(loading.rows[:came], rows(*range(came)))


def test_an_owner_never_waits_for_a_tier(tmp_path):
    """Stores are bounded, too: what a stuck tier does not take waits by name, and gives way."""
    with Stacked(host(tmp_path, 90), max_waiting_blocks=10) as alone, Stuck(alone, HOST):
        for start in range(0, 60, 3):
            alone.stack.offer([name(number) for number in range(start, start + 3)])
            alone.step()
        status = alone.stack.status()[0]
        assert status.waiting_blocks == 10
        assert status.dropped_blocks == 60 - 10 - 2 * 3


def test_a_tier_that_raises_is_as_good_as_empty(both):
    both.offer(*range(4))
    broken = both.stack.call(HOST, lambda _: 1 / 0)
    with pytest.raises(StorageError, match="host: "):
        broken.result(60)
    both.poll()
    assert not any(both.holds(HOST, *range(4)))
    assert both.load(*range(4)) == 4
    both.offer(5)
    assert both.holds(HOST, 5) == [False]
    assert both.stack.status()[0].is_broken


def test_a_container_is_cancelled_as_a_whole(both):
    both.stack.offer([name(1), name(2)], container=7)
    both.stack.offer([name(3)], container=8)
    assert both.stack.cancel(7) == 2
    both.settle()
    assert both.holds(HOST, 1, 2, 3) == [False, False, True]


@pytest.mark.parametrize("rule", ["frequency", "popularity"])
def test_block_offered_twice_goes_to_disk(tmp_path, rule):
    level = Level(DISK, disk(tmp_path, 8), policy_of(rule, 8))
    with Stacked(host(tmp_path, 8), level) as stacked:
        stacked.offer(1, 2)
        assert stacked.holds(DISK, 1, 2) == [False, False]
        stacked.on(HOST, lambda store: store.clear())
        stacked.offer(2, 3)
        assert stacked.holds(DISK, 1, 2, 3) == [False, True, False]


def test_policy_limits_a_tier_to_worthwhile_blocks(tmp_path):
    level = Level(DISK, disk(tmp_path, 8), MinPriorityPrefix(1))
    with Stacked(host(tmp_path, 8), level) as stacked:
        stacked.offer(1)
        stacked.offer(2, priority=1)
        assert stacked.holds(HOST, 1, 2) == [True, True]
        assert stacked.holds(DISK, 1, 2) == [False, True]


def test_stores_yield_to_decode(tmp_path):
    with Stacked(host(tmp_path, 90), store_bytes_per_s=10_000.0) as stacked:
        stacked.stack.offer([name(number) for number in range(90)])
        stored = 0
        for _ in range(110):
            stacked.now_s += 0.01
            stacked.stack.poll(stacked.now_s, is_decoding=True)
            waiting = stacked.stack.due(stacked.now_s)
            stored += len(waiting)
            if waiting:
                stacked.stack.store(waiting, rows(*(each.name.sequence_hash for each in waiting)))
            stacked.stack.call(HOST, lambda _: None).result(60)
        # A burst of four batches of three, and a tenth of ten blocks a second.
        assert stored == 12 + 1
        assert stacked.stack.wait_s(stacked.now_s) == pytest.approx(1.0, abs=0.1)


SLOW = {"store_bytes_per_s": 1.0, "batch_blocks": 1}


def hand_over(stack):
    """What an engine does at its end: give the stack whatever is due."""

    def gather(now_s):
        while waiting := stack.due(now_s):
            stack.store(waiting, rows(*(each.name.sequence_hash for each in waiting)))

    return gather


def test_drain_stores_waiting_blocks_at_any_pace(tmp_path):
    with Stacked(host(tmp_path, 30), disk(tmp_path, 30), **SLOW) as stacked:
        stacked.stack.offer([name(number) for number in range(20)])
        stacked.step()
        assert stacked.stack.drain(hand_over(stacked.stack)) == 0
        assert stacked.stack.drain() == 0
    with Stacked(host(tmp_path, 30), disk(tmp_path, 30)) as second:
        second.stack.start()
        second.settle()
        assert all(second.holds(HOST, *range(20)) + second.holds(DISK, *range(20)))


@pytest.mark.parametrize("has_device", [True, False])
def test_blocks_not_stored_in_time_are_given_up_and_counted(tmp_path, has_device):
    settings = {**SLOW, "drain_s": 0.0 if has_device else 60.0}
    with Stacked(host(tmp_path, 30), disk(tmp_path, 30), **settings) as stacked:
        stacked.stack.offer([name(number) for number in range(20)])
        given_up = stacked.stack.drain(hand_over(stacked.stack) if has_device else None)
        assert given_up == 20 == stacked.stack.status()[0].dropped_blocks


def forgetful():
    """A tier that ends with its process."""
    slots = MemorySlots(host_memory(30 * BLOCK_BYTES), 30)
    return StoredTier(BlockPool(30, LineageEviction()), slots)


def test_process_local_tier_is_not_stored_at_drain(tmp_path):
    """Of host and disk the first outlives the process."""
    with Stacked(host(tmp_path, 30), forgetful(), **SLOW) as stacked:
        stacked.stack.offer([name(number) for number in range(20)])
        assert stacked.stack.drain(hand_over(stacked.stack)) == 0
        assert [status.store.stored for status in stacked.stack.status()] == [20, 0]
    with Stacked(forgetful(), **SLOW) as stacked:
        stacked.stack.offer([name(0)])
        assert stacked.stack.drain(hand_over(stacked.stack)) == 0
        assert stacked.stack.status()[0].store.stored == 0


def test_failing_tier_does_not_delay_drain(tmp_path):
    with Stacked(host(tmp_path, 30), disk(tmp_path, 30), **SLOW) as stacked:
        stacked.stack.offer([name(number) for number in range(20)])
        with in_place_of(tmp_path / "disk", BROKEN):
            assert stacked.stack.drain(hand_over(stacked.stack)) == 0
        stored = [status.store.stored for status in stacked.stack.status()]
        assert stored == [20, 0]
        assert stacked.stack.status()[1].down.failed == 20


def test_blocks_computed_sooner_are_not_loaded(tmp_path):
    with Stacked(host(tmp_path, 8), worth=LoadOrRecompute(16)) as stacked:
        stacked.offer(*range(4))
        assert stacked.load(*range(4)) == 4
        stacked.stack.note_prefill(10**12, 1e-3)
        tried = [stacked.load(*range(4)) for _ in range(TRIED_EVERY)]
        assert tried == [0] * (TRIED_EVERY - 1) + [3]  # a batch: it may be fast by now


def test_later_life_finds_kept_blocks_and_offers_them_on(tmp_path):
    with Stacked(host(tmp_path, 8)) as first:
        first.offer(*range(6))
    with Stacked(host(tmp_path, 8), disk(tmp_path, 8)) as second:
        second.stack.start()
        second.settle()
        assert all(second.holds(HOST, *range(6)) + second.holds(DISK, *range(6)))
        assert second.load(*range(6)) == 6


def test_tiers_are_measured_and_advised_on(tmp_path):
    with Stacked(host(tmp_path, 8), disk(tmp_path, 6), worth=LoadOrRecompute(1)) as stacked:
        assert stacked.stack.status()[0].probe is None
        stacked.stack.start()
        stacked.settle()
        probes = [status.probe for status in stacked.stack.status()]
        assert all(probe.read_bytes_per_s > 0 for probe in probes)
        assert stacked.changes == []
        [small] = stacked.stack.advice(device_blocks=8, block_size=1)
        assert small.startswith("disk: 6 blocks, fewer than host has (8)")
        stacked.offer(0, 1)
        stacked.stack.note_prefill(10**12, 1e-3)
        assert stacked.load(0, 1) == 0  # before anything was loaded
        assert len(stacked.stack.advice(device_blocks=8, block_size=1)) == 3


def test_clear_cancels_pending_transfers(both):
    both.offer(*range(6))
    both.stack.offer([name(number) for number in range(6, 9)])
    both.step()
    both.stack.clear()
    both.settle()
    assert not both.stack.held(name(0).identity)
    assert [status.held_blocks for status in both.stack.status()] == [0, 0]
    assert both.load(*range(9)) == 0


def test_stack_without_tiers_works():
    with Stacked() as stacked:
        stacked.offer(1)
        assert stacked.load(1) == 0
        assert stacked.stack.wait_s(0.0) is None
