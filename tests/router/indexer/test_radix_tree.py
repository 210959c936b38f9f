"""The radix tree against its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from oracle.index import ExactIndex
from router.indexer.base import Overlap
from router.indexer.radix_tree import RadixTree
from router.protocol.values import Rank, Tier
from router.sequence.hashing import chain

W1, W2 = Rank(1, 0), Rank(2, 0)


def array(*hashes):
    return np.array(hashes, dtype=np.uint64)


def device(scores, rank):
    return scores[rank].device if rank in scores else 0


def test_empty_tree_matches_nothing():
    assert RadixTree().find_matches(array(1, 2)) == {}
    assert RadixTree().find_matches(array()) == {}


def test_overlap_is_the_longest_held_prefix():
    tree = RadixTree()
    tree.store(W1, Tier.DEVICE, array(1, 2, 4))
    assert tree.find_matches(array(1, 2, 3, 4)) == {W1: Overlap(2, 2, 2, 2)}


def test_one_ranks_eviction_leaves_the_others():
    """Dynamo 1.0.2 credits w2 with 4 blocks here."""
    tree = RadixTree()
    tree.store(W1, Tier.DEVICE, array(1, 2, 3, 4))
    tree.store(W2, Tier.DEVICE, array(1, 2))
    tree.remove(W1, Tier.DEVICE, array(2))
    scores = tree.find_matches(array(1, 2, 3, 4))
    assert (device(scores, W1), device(scores, W2)) == (1, 2)


def test_equal_set_sizes_do_not_confuse_it():
    """Dynamo 1.0.2 credits w3 with 3 blocks here."""
    tree, w3 = RadixTree(), Rank(3, 0)
    tree.store(W1, Tier.DEVICE, array(1, 2, 3))
    tree.store(W2, Tier.DEVICE, array(1))
    tree.store(w3, Tier.DEVICE, array(1, 2))
    tree.remove(W1, Tier.DEVICE, array(2))
    scores = tree.find_matches(array(1, 2, 3))
    assert [device(scores, w) for w in (W1, W2, w3)] == [1, 1, 2]


@pytest.mark.parametrize("lost", [1, 2, 4])
def test_a_restored_block_reconnects_what_stayed(lost):
    """Dynamo 1.6.1 finds 2 of 4 after a middle block and 1 after the root."""
    tree = RadixTree()
    tree.store(W1, Tier.DEVICE, array(1, 2, 3, 4))
    tree.remove(W1, Tier.DEVICE, array(lost))
    assert device(tree.find_matches(array(1, 2, 3, 4)), W1) == lost - 1
    tree.store(W1, Tier.DEVICE, array(lost))
    tree.store(W1, Tier.DEVICE, array(5))
    assert device(tree.find_matches(array(1, 2, 3, 4, 5)), W1) == 5


def test_children_may_come_before_their_parents():
    tree = RadixTree()
    tree.store(W1, Tier.DEVICE, array(3, 4))
    tree.store(W1, Tier.DEVICE, array(1, 2))
    assert device(tree.find_matches(array(1, 2, 3, 4)), W1) == 4


def test_ranks_of_one_worker_are_apart():
    tree = RadixTree()
    tree.store(Rank(1, 0), Tier.DEVICE, array(1))
    tree.store(Rank(1, 1), Tier.DEVICE, array(1, 2))
    tree.clear(Rank(1, 0))
    assert tree.find_matches(array(1, 2)) == {Rank(1, 1): Overlap(2, 2, 2, 2)}


def test_tiers_are_cumulative():
    tree = RadixTree()
    tree.store(W1, Tier.DEVICE, array(1, 4))
    tree.store(W1, Tier.HOST, array(1, 2))
    tree.store(W1, Tier.REMOTE, array(3))
    assert tree.find_matches(array(1, 2, 3, 4)) == {W1: Overlap(1, 2, 2, 4)}


def test_a_rank_without_the_first_block_is_not_named():
    tree = RadixTree()
    tree.store(W1, Tier.DEVICE, array(2, 3))
    assert tree.find_matches(array(1, 2, 3)) == {}


def test_hashes_at_both_ends_of_the_range_are_blocks_like_any():
    tree = RadixTree()
    tree.store(W1, Tier.DEVICE, array(0, 2**64 - 1))
    assert device(tree.find_matches(array(0, 2**64 - 1)), W1) == 2


ranks = st.builds(Rank, st.integers(0, 2), st.integers(0, 1))
tiers = st.sampled_from(Tier)
blocks = st.lists(st.integers(0, 12), max_size=8)


class AgainstTheOracle(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tree, self.oracle = RadixTree(), ExactIndex()

    def both(self, method, *arguments):
        for index in (self.tree, self.oracle):
            getattr(index, method)(*arguments)

    @rule(rank=ranks, tier=tiers, hashes=blocks)
    def store(self, rank, tier, hashes):
        self.both("store", rank, tier, array(*hashes))

    @rule(rank=ranks, tier=tiers, hashes=blocks)
    def remove(self, rank, tier, hashes):
        self.both("remove", rank, tier, array(*hashes))

    @rule(rank=ranks, tier=st.none() | tiers)
    def clear(self, rank, tier):
        self.both("clear", rank, tier)

    @rule(prompt=st.lists(st.integers(0, 12), max_size=12, unique=True))
    def match(self, prompt):
        assert self.tree.find_matches(array(*prompt)) == self.oracle.find_matches(array(*prompt))

    @rule(rank=ranks)
    def summarise(self, rank):
        assert self.tree.summary(rank) == self.oracle.summary(rank)

    @rule(rank=ranks, tier=tiers)
    def dump(self, rank, tier):
        assert sorted(self.tree.held(rank, tier)) == self.oracle.held(rank, tier).tolist()

    @invariant()
    def holds(self):
        self.tree.check_invariants()
        assert self.tree.block_count() == self.oracle.block_count()


AgainstTheOracle.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None
)
TestAgainstTheOracle = AgainstTheOracle.TestCase


@given(
    st.lists(st.tuples(ranks, tiers, st.integers(0, 3), st.integers(0, 30)), max_size=30),
    st.integers(0, 3),
)
def test_real_prompts_sharing_prefixes(stored, asked):
    """Chains of hashes, four prompts that part at different depths."""
    prompts = [chain([*range(8), *range(100 * p, 100 * p + 24)]) for p in range(4)]
    tree, oracle = RadixTree(), ExactIndex()
    for rank, tier, prompt, length in stored:
        for index in (tree, oracle):
            index.store(rank, tier, prompts[prompt][:length])
    assert tree.find_matches(prompts[asked]) == oracle.find_matches(prompts[asked])
