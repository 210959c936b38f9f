"""The block pool against its state table."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker_agent.blocks.pool import BlockPool, BlockRemoved, BlockStored, CacheCleared


def filled(num_blocks, *hashes):
    """A pool that caches a chain of hashes, nobody using them."""
    pool = BlockPool(num_blocks)
    blocks, parent = pool.allocate(len(hashes)), None
    for index, sequence_hash in enumerate(hashes):
        blocks[index] = pool.register(blocks[index], sequence_hash, parent)
        parent = sequence_hash
    pool.release(blocks)
    pool.take_changes()
    return pool


def test_matches_the_leading_blocks_that_are_there():
    pool = filled(8, 1, 2, 3)
    assert pool.matching([1, 2, 9, 3]) == 2
    blocks = pool.match([1, 2, 9])
    assert len(blocks) == 2
    assert pool.used_blocks == 2
    pool.check_invariants()


def test_allocates_all_or_nothing():
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.available_blocks == 4
    assert len(pool.allocate(4)) == 4
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_evicts_the_least_recently_used_first():
    pool = filled(4, 1)
    for sequence_hash in (2, 3):
        pool.release([pool.register(pool.allocate(1)[0], sequence_hash, None)])
    pool.release(pool.match([1]))
    pool.take_changes()
    pool.allocate(3)
    assert pool.take_changes() == [BlockRemoved(2), BlockRemoved(3)]


def test_evicts_a_suffix_before_its_prefix():
    pool = filled(4, 1, 2, 3)
    pool.allocate(3)
    assert pool.take_changes() == [BlockRemoved(3), BlockRemoved(2)]


def test_does_not_evict_what_is_in_use():
    pool = filled(3, 1, 2)
    pool.match([1])
    assert pool.available_blocks == 2
    pool.allocate(2)
    assert pool.matching([1, 2]) == 1
    assert pool.allocate(1) is None


def test_says_what_it_stores():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, 1, None)
    pool.register(second, 2, 1)
    assert pool.take_changes() == [BlockStored(1, None), BlockStored(2, 1)]
    assert pool.take_changes() == []


def test_a_hash_that_is_there_already_gives_the_block_that_has_it():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.register(first, 1, None) == first
    assert pool.register(second, 1, None) == first
    assert pool.take_changes() == [BlockStored(1, None)]
    assert pool.used_blocks == 1
    pool.release([first])
    pool.release([first])
    assert pool.used_blocks == 0
    pool.check_invariants()


def test_private_blocks_go_back_without_a_trace():
    pool = BlockPool(2)
    pool.release(pool.allocate(2))
    assert pool.take_changes() == []
    assert pool.available_blocks == 2


def test_clearing_takes_names_away_but_not_blocks_in_use():
    pool = filled(4, 1, 2)
    blocks = pool.match([1])
    pool.clear()
    assert pool.take_changes() == [CacheCleared()]
    assert pool.matching([1]) == 0
    assert pool.used_blocks == 1
    pool.check_invariants()
    pool.release(blocks)
    assert pool.available_blocks == 4
    pool.check_invariants()


def test_a_block_is_released_once():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


class AgainstASet(RuleBasedStateMachine):
    """Users hold chains; the changes told, replayed, are the names there are."""

    def __init__(self):
        super().__init__()
        self.pool, self.users, self.names = BlockPool(6), [], set()

    @rule(prompt=st.integers(0, 2), length=st.integers(1, 4))
    def use(self, prompt, length):
        hashes = [1, *range(10 * prompt + 10, 10 * prompt + 14)][:length]
        blocks = self.pool.match(hashes)
        fresh = self.pool.allocate(length - len(blocks))
        if fresh is None:
            self.pool.release(blocks)
            return
        for index in range(len(blocks), length):
            parent = hashes[index - 1] if index else None
            blocks.append(self.pool.register(fresh.pop(0), hashes[index], parent))
        self.users.append(blocks)

    @rule(count=st.integers(0, 3))
    def use_privately(self, count):
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self.users.append(blocks)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def end(self, data):
        self.pool.release(self.users.pop(data.draw(st.integers(0, len(self.users) - 1))))

    @rule()
    def clear(self):
        self.pool.clear()

    @invariant()
    def holds(self):
        self.pool.check_invariants()
        for change in self.pool.take_changes():
            match change:
                case BlockStored(name, _):
                    assert name not in self.names
                    self.names.add(name)
                case BlockRemoved(name):
                    self.names.remove(name)
                case CacheCleared():
                    self.names.clear()
        assert self.names == set(self.pool._by_hash)
        assert self.pool.used_blocks == len({b for blocks in self.users for b in blocks})


AgainstASet.TestCase.settings = settings(max_examples=200, deadline=None)
TestAgainstASet = AgainstASet.TestCase
