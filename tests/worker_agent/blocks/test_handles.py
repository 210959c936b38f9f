"""Handles: blocks are released once, also those of lost handles."""

import gc

import pytest

from router.errors import InvalidFieldError
from worker_agent.blocks.errors import (
    BlockStateError,
    NotEnoughBlocksError,
    PoolClosedError,
    ReleasedBlocksError,
)
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.handles import Tier
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import Duplicates, PoolStatus


def tier_of(num_blocks=4, duplicates=Duplicates.REJECTED):
    return Tier(BlockPool(num_blocks, LruEviction(), duplicates))


def names(*numbers):
    return [BlockName(number.to_bytes(16, "little"), number) for number in numbers]


def identities(*numbers):
    return [name.identity for name in names(*numbers)]


def kept(tier, *numbers):
    """The tier keeps these, unused."""
    tier.allocate(len(numbers)).register(names(*numbers)).release()


def test_filled_blocks_are_used_together():
    tier = tier_of()
    with tier.allocate(2) as mutable:
        mine = mutable.register(names(1, 2))
        assert not mutable.is_live
    with mine, tier.match(identities(1, 2, 3)) as theirs:
        assert theirs.block_ids == mine.block_ids
        assert len(theirs) == 2
    assert tier.pool.status == PoolStatus(0, 2, 2)
    tier.pool.check_invariants()


def test_unfilled_blocks_are_returned():
    tier = tier_of()
    with pytest.raises(ZeroDivisionError), tier.allocate(3):
        1 / 0  # noqa: B018
    assert tier.pool.status == PoolStatus(0, 0, 4)


def test_allocation_is_all_or_nothing():
    tier = tier_of()
    held = tier.allocate(3)
    with pytest.raises(NotEnoughBlocksError, match=r"2 requested \(allowed: at most 1 now\)"):
        tier.allocate(2)
    assert tier.pool.used_blocks == 3
    held.release()


def test_a_released_handle_is_of_no_use():
    tier = tier_of()
    mutable = tier.allocate(1)
    immutable = mutable.register(names(1))
    immutable.release()
    for handle in (mutable, immutable):
        with pytest.raises(ReleasedBlocksError):
            handle.release()
        with pytest.raises(ReleasedBlocksError):
            _ = handle.block_ids
    with pytest.raises(ReleasedBlocksError):
        mutable.register(names(1))
    with pytest.raises(ReleasedBlocksError):
        immutable.share()


def test_each_block_needs_a_name():
    tier = tier_of()
    with tier.allocate(2) as mutable:
        with pytest.raises(InvalidFieldError, match=r"names: 1 \(allowed: 2, one per block\)"):
            mutable.register(names(1))
        assert mutable.is_live


def test_each_share_is_released_by_itself():
    tier = tier_of()
    first = tier.allocate(1).register(names(1))
    second = first.share()
    first.release()
    assert tier.pool.used_blocks == 1
    second.release()
    assert tier.pool.used_blocks == 0


def test_a_duplicate_is_shared_like_any_other():
    tier = tier_of(duplicates=Duplicates.KEPT)
    first, second = (tier.allocate(1).register(names(1)) for _ in range(2))
    assert first.block_ids != second.block_ids
    third = second.share()
    assert third.block_ids == second.block_ids
    for handle in (first, second, third):
        handle.release()
        tier.pool.check_invariants()
    assert tier.pool.used_blocks == 0


def test_private_blocks_have_one_user():
    tier = tier_of()
    with tier.allocate(1) as mutable, pytest.raises(BlockStateError, match="private"):
        tier.pool.use_again(mutable.block_ids)


def test_weak_blocks_keep_nothing():
    tier = tier_of(4)
    with tier.allocate(3).register(names(1, 2, 3)) as strong:
        weak = strong.weak()
        with weak.upgrade() as again:
            assert again.block_ids == strong.block_ids
    with weak.upgrade() as again:
        assert len(again) == 3
    with tier.allocate(3), weak.upgrade() as again:
        assert len(again) == 1  # the tail was given up
    tier.pool.reset()
    with weak.upgrade() as again:
        assert len(again) == 0
    gc.collect()
    tier.pool.check_invariants()


def test_leaked_blocks_return_and_are_counted():
    tier = tier_of()
    tier.allocate(2).register(names(1, 2))
    gc.collect()
    assert tier.status == PoolStatus(0, 2, 2)
    assert tier.leaked_blocks == 2
    kept(tier, 3)
    gc.collect()
    assert (tier.status, tier.leaked_blocks) == (PoolStatus(0, 3, 1), 2)


def test_a_handle_collected_within_a_call_goes_back_after_it():
    class Collecting(LruEviction):
        """A collector that runs while the pool evicts."""

        __slots__ = ()

        def pop(self, count):
            cycle[:] = []
            return super().pop(count)

    tier = Tier(BlockPool(3, Collecting()))
    kept(tier, 1, 2)
    cycle = [tier.allocate(1)]
    tier.allocate(1).release()
    assert (tier.status, tier.leaked_blocks) == (PoolStatus(0, 1, 2), 1)
    tier.pool.check_invariants()


def test_a_closed_tier_only_takes_back():
    tier = tier_of()
    held = tier.allocate(1)
    tier.close()
    with pytest.raises(PoolClosedError, match="pool: closed"):
        tier.allocate(1)
    with pytest.raises(PoolClosedError):
        tier.match(identities(1))
    held.release()
    assert tier.status == PoolStatus(0, 0, 4)
