"""The block pool against its state table."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.chaos.fuzzing import examples
from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared
from worker_agent.blocks.errors import BlockStateError, PoolInUseError
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.eviction.multi_lru import MultiLruEviction
from worker_agent.blocks.eviction.simple import LruEviction, PriorityEviction
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import (
    BlockMetadata,
    Duplicates,
    PoolCounters,
    PoolStatus,
    ResetOutcome,
)


def identity(number):
    return number.to_bytes(16, "little")


def identities(*numbers):
    return [identity(number) for number in numbers]


def chain(*numbers):
    """Names of blocks that follow each other."""
    parents = [None, *numbers[:-1]]
    return [
        BlockName(identity(number), number, None if parent is None else identity(parent), parent)
        for number, parent in zip(numbers, parents, strict=True)
    ]


def pool_of(num_blocks, eviction=LruEviction, duplicates=Duplicates.REJECTED):
    return BlockPool(num_blocks, eviction(), duplicates)


def filled(num_blocks, *numbers, eviction=LruEviction):
    """A pool that keeps an unused chain."""
    pool = pool_of(num_blocks, eviction)
    pool.release(pool.register(pool.allocate(len(numbers)), chain(*numbers)))
    pool.take_changes()
    return pool


def removed(pool):
    return [change.name.sequence_hash for change in pool.take_changes()]


def test_matches_the_leading_blocks_that_are_there():
    pool = filled(8, 1, 2, 3)
    assert pool.matching(identities(1, 2, 9, 3)) == 2
    blocks = pool.match(identities(1, 2, 9))
    assert [pool.name(block).sequence_hash for block in blocks] == [1, 2]
    assert pool.status == PoolStatus(active_blocks=2, inactive_blocks=1, empty_blocks=5)
    pool.check_invariants()


def test_matches_around_gaps():
    pool = filled(8, 1, 2, 3)
    first, gap, third = pool.match_scattered(identities(1, 9, 3))
    assert (pool.name(first).sequence_hash, gap, pool.name(third).sequence_hash) == (1, None, 3)
    assert pool.used_blocks == 2
    pool.release([first, third])
    assert pool.scan(identities(3, 9)) == [third, None]
    assert pool.used_blocks == 0
    pool.check_invariants()


def test_allocates_all_or_nothing():
    pool = pool_of(4)
    assert pool.allocate(5) is None
    assert pool.available_blocks == 4
    assert len(pool.allocate(4)) == 4
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_evicts_what_was_returned_first():
    pool = filled(4, 1)
    for number in (2, 3):
        pool.release(pool.register(pool.allocate(1), chain(number)))
    pool.release(pool.match(identities(1)))
    pool.take_changes()
    pool.allocate(3)
    assert removed(pool) == [2, 3]


@pytest.mark.parametrize("eviction", [LruEviction, LineageEviction, PriorityEviction])
def test_evicts_a_suffix_before_its_prefix(eviction):
    pool = filled(4, 1, 2, 3, eviction=eviction)
    pool.allocate(3)
    assert removed(pool) == [3, 2]


def test_a_touched_prefix_stays_longer():
    pool = filled(4, 1, 2)
    pool.release(pool.register(pool.allocate(1), chain(7)))
    assert pool.touch(identities(1, 2, 9)) == 2
    pool.take_changes()
    pool.allocate(2)
    assert removed(pool) == [7]


def test_low_priority_goes_first():
    pool = pool_of(3, PriorityEviction)
    for number, priority in ((1, 5), (2, 0), (3, 5)):
        pool.release(pool.register(pool.allocate(1), chain(number), priority))
    pool.take_changes()
    pool.allocate(2)
    assert removed(pool) == [2, 1]


def test_frequent_blocks_are_kept():
    pool = pool_of(3, lambda: MultiLruEviction(64))
    for number in (1, 2, 3):
        pool.release(pool.register(pool.allocate(1), chain(number)))
    for _ in range(4):
        pool.touch(identities(1))
    pool.take_changes()
    pool.allocate(2)
    assert removed(pool) == [2, 3]


def test_does_not_evict_what_is_in_use():
    pool = filled(3, 1, 2)
    pool.match(identities(1))
    assert pool.available_blocks == 2
    pool.allocate(2)
    assert pool.matching(identities(1, 2)) == 1
    assert pool.allocate(1) is None


def test_stored_blocks_are_reported():
    pool = pool_of(4)
    names = chain(1, 2)
    pool.register(pool.allocate(2), names)
    assert pool.take_changes() == [BlockStored(name) for name in names]
    assert pool.take_changes() == []


def test_known_name_returns_its_block():
    pool = pool_of(4)
    first, second = pool.allocate(2)
    assert pool.register([first, second], chain(1) * 2) == [first, first]
    assert len(pool.take_changes()) == 1
    assert pool.used_blocks == 1
    pool.release([first])
    pool.release([first])
    assert pool.used_blocks == 0
    assert pool.counters.duplicates == 1
    pool.check_invariants()


def test_a_duplicate_that_is_kept_goes_without_a_trace():
    pool = pool_of(4, duplicates=Duplicates.KEPT)
    first, second = pool.allocate(2)
    assert pool.register([first, second], chain(1) * 2) == [first, second]
    pool.check_invariants()
    pool.release([second])
    assert pool.status == PoolStatus(active_blocks=1, inactive_blocks=0, empty_blocks=3)
    assert len(pool.take_changes()) == 1
    pool.check_invariants()


def test_only_private_blocks_are_named():
    pool = pool_of(4)
    first, second = pool.allocate(2)
    pool.register([first], chain(1))
    with pytest.raises(BlockStateError, match=f"block: {first} is shared"):
        pool.register([second, first], chain(2, 3))
    assert pool.matching(identities(2)) == 0


def test_private_blocks_go_back_without_a_trace():
    pool = pool_of(2)
    pool.release(pool.allocate(2))
    assert pool.take_changes() == []
    assert pool.available_blocks == 2


def test_clearing_takes_names_away_but_not_blocks_in_use():
    pool = filled(4, 1, 2)
    blocks = pool.match(identities(1))
    pool.clear()
    assert pool.take_changes() == [CacheCleared()]
    assert pool.matching(identities(1)) == 0
    assert pool.used_blocks == 1
    pool.check_invariants()
    pool.release(blocks)
    assert pool.available_blocks == 4
    pool.check_invariants()


def test_reset_is_refused_while_blocks_are_in_use():
    pool = filled(4, 1, 2)
    blocks = pool.match(identities(1))
    with pytest.raises(PoolInUseError, match="total blocks: 4, available blocks: 3"):
        pool.reset()
    assert pool.matching(identities(1, 2)) == 2
    pool.release(blocks)
    pool.reset()
    assert pool.status == PoolStatus(0, 0, 4)


def test_single_names_are_given_up():
    pool = filled(4, 1, 2)
    pool.match(identities(1))
    outcome = pool.reset_blocks(identities(1, 2, 3))
    assert outcome == ResetOutcome(
        reset_blocks=identities(2), not_found=identities(3), not_reset=identities(1)
    )
    assert removed(pool) == [2]
    pool.check_invariants()


def test_a_block_is_released_once():
    pool = pool_of(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(BlockStateError, match="block: 0 is free"):
        pool.release(blocks)
    pool.check_invariants()


def test_ticks_grow_and_priority_goes_with_the_name():
    pool = pool_of(2)
    [block] = pool.register(pool.allocate(1), chain(1), priority=4)
    first = pool.metadata(block)
    assert (first.priority, first.returned_tick) == (4, 0)
    pool.release([block])
    returned = pool.metadata(block)
    assert returned.returned_tick > first.acquired_tick == returned.acquired_tick
    pool.match(identities(1))
    assert pool.metadata(block).acquired_tick > returned.returned_tick
    assert first < returned < BlockMetadata(5, 0, 0)
    pool.release([block])
    pool.reset()
    assert pool.metadata(block).priority == 0


def test_a_block_is_named_once():
    pool = pool_of(2)
    [block] = pool.allocate(1)
    with pytest.raises(BlockStateError, match=f"block: {block} is listed twice"):
        pool.register([block, block], chain(1, 2))
    assert pool.matching(identities(1)) == 0


def test_operations_are_counted():
    pool = pool_of(3, duplicates=Duplicates.KEPT)
    for number in (1, 1, 2):
        pool.register(pool.allocate(1), chain(number))
    pool.release([0, 1, 2])
    pool.allocate(2)
    pool.match(identities(1, 2, 3))
    pool.scan(identities(1, 3))
    expected = PoolCounters(
        allocations=5, evictions=1, registrations=2, duplicates=1, kept_duplicates=1,
        requested=3, matched=1, scanned=2, found=1,
    )  # fmt: skip
    assert pool.counters == expected
    assert pool.private_blocks == 2
    in_use, unused = pool.named().by_use()
    assert ([name.sequence_hash for name in in_use], unused) == ([1], [])


EVICTIONS = [LruEviction, PriorityEviction, LineageEviction, lambda: MultiLruEviction(8)]


class AgainstASet(RuleBasedStateMachine):
    """Users hold chains; the reported changes, replayed, are the names there are."""

    def __init__(self):
        super().__init__()
        self.users, self.names = [], set()

    @initialize(eviction=st.sampled_from(EVICTIONS), duplicates=st.sampled_from(Duplicates))
    def make(self, eviction, duplicates):
        self.pool = pool_of(6, eviction, duplicates)

    @rule(prompt=st.integers(0, 2), length=st.integers(1, 4), priority=st.integers(0, 2))
    def use(self, prompt, length, priority):
        names = chain(1, *range(10 * prompt + 10, 10 * prompt + 14))[:length]
        blocks = self.pool.match([name.identity for name in names])
        fresh = self.pool.allocate(length - len(blocks))
        if fresh is None:
            self.pool.release(blocks)
            return
        self.users.append(blocks + self.pool.register(fresh, names[len(blocks) :], priority))

    @rule(numbers=st.lists(st.integers(10, 33), unique=True, max_size=4))
    def use_scattered(self, numbers):
        blocks = self.pool.match_scattered(identities(*numbers))
        self.users.append([block for block in blocks if block is not None])

    @rule(count=st.integers(0, 3))
    def use_privately(self, count):
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self.users.append(blocks)

    @rule(number=st.integers(10, 33))
    def compute_what_may_be_there(self, number):
        """A block computed although another may hold the same by now."""
        blocks = self.pool.allocate(1)
        if blocks is not None:
            self.users.append(self.pool.register(blocks, chain(number)))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def end(self, data):
        self.pool.release(self.users.pop(data.draw(st.integers(0, len(self.users) - 1))))

    @rule(numbers=st.lists(st.integers(10, 33), max_size=3))
    def give_up(self, numbers):
        used = {block for blocks in self.users for block in blocks}
        outcome = self.pool.reset_blocks(identities(*numbers))
        for each in outcome.not_reset:
            assert self.pool.scan([each])[0] in used

    @rule(numbers=st.lists(st.integers(10, 33), max_size=3))
    def forget(self, numbers):
        forgotten = self.names.intersection(identities(*numbers))
        assert self.pool.forget(identities(*numbers)) == len(forgotten)

    @rule(numbers=st.lists(st.integers(10, 33), unique=True, max_size=3))
    def hold(self, numbers):
        before = self.pool.counters.requested
        blocks = self.pool.hold(identities(*numbers))
        self.users.append([block for block in blocks if block is not None])
        assert self.pool.counters.requested == before

    @rule(blocks=st.lists(st.integers(0, 5), max_size=3, unique=True))
    def claim(self, blocks):
        empty = {block for block in range(6) if self.pool.state(block) == "free"}
        claimed = self.pool.claim(blocks)
        assert claimed == [block for block in blocks if block in empty]
        self.users.append(claimed)

    @rule()
    def clear(self):
        self.pool.clear()

    @invariant()
    def holds(self):
        self.pool.check_invariants()
        for change in self.pool.take_changes():
            match change:
                case BlockStored(name):
                    assert name.identity not in self.names
                    self.names.add(name.identity)
                case BlockRemoved(name):
                    self.names.remove(name.identity)
                case CacheCleared():
                    self.names.clear()
        used, unused = self.pool.named().by_use()
        assert sorted(self.names) == sorted(name.identity for name in (*used, *unused))
        assert self.pool.used_blocks == len({b for blocks in self.users for b in blocks})


AgainstASet.TestCase.settings = settings(max_examples=examples(60))
TestAgainstASet = AgainstASet.TestCase
