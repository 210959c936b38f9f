"""Guesses of what ranks hold, against a plain table of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from oracle.index import ExactIndex
from router.indexer.approximate import (
    PRUNE_BLOCKS,
    ApproximateIndex,
    ApproximateLimits,
    merge_maximum,
)
from router.indexer.base import Overlap
from router.protocol.values import Rank, Tier
from router.sequence.hashing.block_hashes import chain
from support.chaos.fuzzing import examples

W1, W2 = Rank(1, 0), Rank(2, 0)


def array(*hashes):
    return np.array(hashes, dtype=np.uint64)


def approximate(index=None, **limits):
    return ApproximateIndex(index or ExactIndex(), ApproximateLimits(**limits))


def depths(index, *hashes):
    return {rank: overlap.device for rank, overlap in index.find_matches(array(*hashes)).items()}


class SmallIndex(ExactIndex):
    """Has room for a number of blocks; of more, it takes some."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def store(self, rank, tier, sequence_hashes):
        for position in range(len(sequence_hashes)):
            if self.block_count() == self.room:
                return False
            super().store(rank, tier, sequence_hashes[position : position + 1])
        return True


def test_a_routed_prompt_counts_as_held_on_the_device():
    index = approximate()
    assert index.insert(W1, array(1, 2, 3), 0.0)
    assert index.find_matches(array(1, 2, 9)) == {W1: Overlap(2, 2, 2, 2)}
    assert index.entry_count() == 3


def test_entry_expires_exactly_at_its_ttl():
    index = approximate(ttl_s=10.0)
    index.insert(W1, array(1, 2), 5.0)
    assert index.expire(14.9, 1 << 20) == 0
    assert depths(index, 1, 2) == {W1: 2}
    assert index.expire(15.0, 1 << 20) == 2
    assert depths(index, 1, 2) == {}
    assert (index.entry_count(), index.expired_blocks) == (0, 2)


def test_repeated_insert_renews_its_blocks():
    index = approximate(ttl_s=10.0)
    index.insert(W1, array(1, 2, 3), 0.0)
    index.insert(W1, array(1, 2), 6.0)
    assert index.entry_count() == 3
    assert index.expire(10.0, 1 << 20) == 1
    assert depths(index, 1, 2, 3) == {W1: 2}
    assert index.expire(16.0, 1 << 20) == 2


def test_pruning_takes_the_earliest_and_of_them_the_deepest_first():
    index = approximate(max_blocks=8, prune_target=0.5)
    index.insert(W1, array(1, 2, 3, 4), 0.0)
    index.insert(W2, array(1, 2, 3, 4), 1.0)
    assert index.entry_count() == 8
    index.insert(W1, array(1, 5), 2.0)
    assert (index.entry_count(), index.pruned_blocks) == (4, 5)
    assert depths(index, 1, 2, 3, 4) == {W1: 1, W2: 2}
    assert depths(index, 1, 5) == {W1: 2, W2: 1}


def test_a_prompt_longer_than_the_limit_keeps_its_first_blocks():
    index = approximate(max_blocks=10, prune_target=0.8)
    index.insert(W1, array(*range(100, 105)), 0.0)
    index.insert(W1, array(*range(50)), 1.0)
    assert (index.entry_count(), index.pruned_blocks) == (8, 47)
    assert depths(index, *range(50)) == {W1: 8}


def test_removing_a_rank_leaves_the_others():
    index = approximate(ttl_s=10.0)
    for rank in (W1, W2):
        index.insert(rank, array(1, 2), 0.0)
        index.insert(rank, array(1, 3), 1.0)
    index.remove_rank(W1)
    index.remove_rank(Rank(3, 0))
    assert (depths(index, 1, 2), index.entry_count()) == ({W2: 2}, 3)
    assert (index.expire(99.0, 1 << 20), index.expired_blocks) == (3, 3)


def test_the_callers_array_may_change_afterwards():
    index, prompt = approximate(ttl_s=10.0), array(1, 2)
    index.insert(W1, prompt, 0.0)
    prompt[:] = 7
    assert index.expire(10.0, 1 << 20) == 2
    assert depths(index, 1, 2) == {}


def test_hashes_at_both_ends_of_the_range_are_blocks_like_any():
    index = approximate(ttl_s=10.0)
    index.insert(W1, array(0, 2**64 - 1), 0.0)
    assert depths(index, 0, 2**64 - 1) == {W1: 2}
    assert index.expire(10.0, 1 << 20) == 2


def test_a_long_shared_prefix_is_not_kept_once_per_prompt():
    """Each prompt adds one block behind 1000 shared ones; the invariants bound what is kept."""
    index, shared = approximate(), list(range(1000))
    for last in range(1000, 1100):
        index.insert(W1, array(*shared, last), 0.0)
    assert index.entry_count() == 1100
    index.check_invariants()


@pytest.mark.parametrize("known", [array(), array(1), array(1, 2, 3)])
def test_a_prompt_that_the_index_has_no_room_for_changes_nothing(known):
    index = approximate(SmallIndex(room=4), ttl_s=10.0)
    index.insert(W1, known, 0.0)
    assert not index.insert(W1, array(1, 2, 4, 5, 6), 5.0)
    index.check_invariants()
    assert index.entry_count() == len(known)
    assert index.expire(10.0, 1 << 20) == len(known)


def test_merging_takes_the_longer_overlap_of_every_tier():
    a = {W1: Overlap(2, 4, 4, 4)}
    b = {W1: Overlap(3, 3, 3, 5), W2: Overlap(1, 1, 1, 1)}
    merged = {W1: Overlap(3, 4, 4, 5), W2: Overlap(1, 1, 1, 1)}
    assert merge_maximum(a, b) == merge_maximum(b, a) == merged
    assert (a, len(b)) == ({W1: Overlap(2, 4, 4, 4)}, 2)


def test_pruning_and_expiry_go_by_slices():
    index = approximate(max_blocks=4_000, prune_target=0.25)
    for start in range(0, 4_100, 100):
        index.insert(W1, chain(list(range(start, start + 100))), 0.0)
    assert index.entry_count() == 4_100 - (2 * 100 + PRUNE_BLOCKS)
    for start in range(9_000, 9_300, 100):
        index.insert(W1, chain(list(range(start, start + 100))), 0.0)
    assert index.entry_count() == 4_100 - (2 * 100 + PRUNE_BLOCKS) - 3 * (100 + PRUNE_BLOCKS)
    assert [index.expire(130.0, 400) for _ in range(5)] == [400, 400, 400, 352, 0]
    index.check_invariants()


ranks = st.builds(Rank, st.integers(0, 1), st.integers(0, 1))
paths = st.lists(st.integers(0, 1), max_size=8)
held_blocks = st.lists(st.tuples(ranks, st.sampled_from(Tier), st.integers(0, 8)), max_size=8)


@given(held_blocks, held_blocks)
def test_merging_is_what_either_of_two_indexes_finds(exact, guessed):
    """Prefixes of one prompt: the longer of two held prefixes is what both together hold."""
    prompt = chain(list(range(8)))
    indexes = ExactIndex(), ExactIndex(), ExactIndex()
    for one, blocks in zip(indexes, (exact, guessed), strict=False):
        for rank, tier, length in blocks:
            for index in (one, indexes[2]):
                index.store(rank, tier, prompt[:length])
    a, b, both = (index.find_matches(prompt) for index in indexes)
    assert merge_maximum(a, b) == both


class Table:
    """Every entry with its place in the order of expiry, sorted anew each time."""

    def __init__(self, limits):
        self.limits = limits
        self.entries = {}
        self.parents = {}
        self.inserts = self.pruned = self.expired = 0

    def insert(self, rank, hashes, now_s):
        self.inserts += 1
        for position, h in enumerate(hashes):
            self.entries[rank, h] = (now_s + self.limits.ttl_s, self.inserts, -position)
            self.parents[h] = hashes[position - 1] if position else None
        if len(self.entries) > self.limits.max_blocks:
            target = int(self.limits.prune_target * self.limits.max_blocks)
            by_expiry = sorted(self.entries, key=self.entries.get)
            self.pruned += len(self._drop(by_expiry[: len(by_expiry) - target]))

    def expire(self, now_s):
        due = self._drop([e for e, (expires_s, _, _) in self.entries.items() if expires_s <= now_s])
        self.expired += len(due)
        return len(due)

    def remove_rank(self, rank):
        self._drop([entry for entry in self.entries if entry[0] == rank])

    def held(self, rank):
        return sorted(h for r, h in self.entries if r == rank)

    def _drop(self, entries):
        return [self.entries.pop(entry) for entry in entries]


class AgainstTheTable(RuleBasedStateMachine):
    @initialize(max_blocks=st.integers(0, 20), prune_target=st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    def start(self, max_blocks, prune_target):
        limits = ApproximateLimits(10.0, max_blocks, prune_target)
        self.exact, self.table, self.now_s = ExactIndex(), Table(limits), 0.0
        self.index = ApproximateIndex(self.exact, limits)

    @rule(rank=ranks, path=paths)
    def insert(self, rank, path):
        prompt = chain(path)
        assert self.index.insert(rank, prompt, self.now_s)
        self.table.insert(rank, prompt.tolist(), self.now_s)

    @rule(passed_s=st.sampled_from([0.5, 3.0, 7.0, 10.0]))
    def wait(self, passed_s):
        self.now_s += passed_s

    @rule()
    def expire(self):
        assert self.index.expire(self.now_s, 1 << 20) == self.table.expire(self.now_s)

    @rule(rank=ranks)
    def remove_rank(self, rank):
        self.index.remove_rank(rank)
        self.table.remove_rank(rank)

    @rule(path=paths)
    def match(self, path):
        prompt, expected = chain(path), ExactIndex()
        for rank, h in self.table.entries:
            expected.store(rank, Tier.DEVICE, array(h))
        assert self.index.find_matches(prompt) == expected.find_matches(prompt)

    @invariant()
    def holds(self):
        self.index.check_invariants()
        assert self.index.entry_count() == len(self.table.entries)
        assert self.index.pruned_blocks == self.table.pruned
        assert self.index.expired_blocks == self.table.expired
        held = {(each.rank, each.tier): each.sequence_hashes.tolist() for each in self.exact.dump()}
        by_rank = {(rank, Tier.DEVICE): self.table.held(rank) for rank, _ in self.table.entries}
        assert held == by_rank

    @invariant()
    def no_block_is_held_without_its_parent(self):
        for rank, h in self.table.entries:
            parent = self.table.parents[h]
            assert parent is None or (rank, parent) in self.table.entries


AgainstTheTable.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestAgainstTheTable = AgainstTheTable.TestCase
