"""The radix tree against its definition, one property after the other."""

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from oracle.index import ExactIndex
from oracle.machine import IDENTITY, key_spread_to
from router.errors import WireError
from router.indexer.base import (
    DIFFERENT,
    DONE,
    NO_OVERLAP,
    NOTHING_HELD,
    REFUSED,
    HeldSummary,
    Overlap,
)
from router.indexer.radix_tree import _block_table, _holder_sets, radix_tree
from router.indexer.radix_tree._memory import MAX_HOLDERS
from router.indexer.radix_tree.matches import blocks_by_rank
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.events import Cleared, EventBatch, Removed, Stored, pack_batch
from router.protocol.values import HeldState, Rank, Tier, pack_hashes
from router.publisher.journal.held_blocks import HeldBlocks
from router.sequence.hashing._digest import digest
from router.sequence.hashing.block_hashes import chain

W1, W2, W3 = Rank(1, 0), Rank(2, 0), Rank(3, 0)
NEVER = 10**9
NO_HOLES = (0, 0, 0, 0)
END = 1 << 63
"""Where the first of two sub-tables ends, for keys that are spread."""


def array(*hashes):
    return np.array(hashes, dtype=np.uint64)


def span(start, end):
    return np.arange(start, end, dtype=np.uint64)


def small_tree(max_blocks=4000, **settings):
    return RadixTree(max_blocks, **{"sub_bits": 1, "check_interval": NEVER, **settings})


def answer(index, hashes):
    return dict(index.find_matches(hashes).items())


def device(index, rank, hashes):
    return index.find_matches(hashes).get(rank, NO_OVERLAP).device


def held(index):
    dumped = list(index.dump())
    assert len({(each.rank, each.tier) for each in dumped}) == len(dumped)
    return {(each.rank, each.tier): sorted(each.sequence_hashes.tolist()) for each in dumped}


def sweep_all(tree):
    while tree.sweep(64):
        pass


class Pair:
    """A tree and its definition, given the same changes."""

    def __init__(self, **settings):
        self.tree, self.oracle = small_tree(**settings), ExactIndex()

    def do(self, method, rank, *arguments):
        for index in (self.tree, self.oracle):
            assert getattr(index, method)(rank, *arguments) in (True, None)

    def agree(self, *prompts):
        for prompt in prompts:
            assert answer(self.tree, prompt) == self.oracle.find_matches(prompt)
        for rank in {rank for rank, _ in self.oracle.sets}:
            assert self.tree.summary(rank) == self.oracle.summary(rank)
        assert held(self.tree) == held(self.oracle)
        self.tree.check_invariants()


def test_empty_tree_matches_nothing():
    tree = small_tree()
    assert answer(tree, array(1, 2)) == answer(tree, array()) == {}
    assert list(tree.dump()) == list(blocks_by_rank(tree.dump_slices())) == []
    assert tree.summary(W1) == NOTHING_HELD
    tree.check_invariants()


def test_overlap_is_the_longest_held_prefix():
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1, 2, 4))
    assert answer(tree, array(1, 2, 3, 4)) == {W1: Overlap(2, 2, 2, 2)}


def test_one_ranks_eviction_leaves_the_others():
    """Dynamo 1.0.2 credits w2 with 4 blocks here."""
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1, 2, 3, 4))
    tree.store(W2, Tier.DEVICE, array(1, 2))
    tree.remove(W1, Tier.DEVICE, array(2))
    assert [device(tree, w, array(1, 2, 3, 4)) for w in (W1, W2)] == [1, 2]


def test_equal_set_sizes_do_not_confuse_it():
    """Dynamo 1.0.2 credits w3 with 3 blocks here."""
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1, 2, 3))
    tree.store(W2, Tier.DEVICE, array(1))
    tree.store(W3, Tier.DEVICE, array(1, 2))
    tree.remove(W1, Tier.DEVICE, array(2))
    assert [device(tree, w, array(1, 2, 3)) for w in (W1, W2, W3)] == [1, 1, 2]


@pytest.mark.parametrize("lost", [1, 2, 4])
def test_a_restored_block_reconnects_what_stayed(lost):
    """Dynamo 1.6.1 finds 2 of 4 after a middle block and 1 after the root."""
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1, 2, 3, 4))
    tree.remove(W1, Tier.DEVICE, array(lost))
    assert device(tree, W1, array(1, 2, 3, 4)) == lost - 1
    tree.store(W1, Tier.DEVICE, array(lost))
    tree.store(W1, Tier.DEVICE, array(5))
    assert device(tree, W1, array(1, 2, 3, 4, 5)) == 5


def test_children_may_come_before_their_parents():
    tree = small_tree()
    for block in (3, 4, 2, 1):
        tree.store(W1, Tier.DEVICE, array(block))
    assert device(tree, W1, array(1, 2, 3, 4)) == 4


def test_ranks_of_one_worker_are_apart():
    tree = small_tree()
    tree.store(Rank(1, 0), Tier.DEVICE, array(1))
    tree.store(Rank(1, 1), Tier.DEVICE, array(1, 2))
    tree.clear(Rank(1, 0))
    assert answer(tree, array(1, 2)) == {Rank(1, 1): Overlap(2, 2, 2, 2)}


def test_tiers_are_cumulative():
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1, 4))
    tree.store(W1, Tier.HOST, array(1, 2))
    tree.store(W1, Tier.REMOTE, array(3))
    assert answer(tree, array(1, 2, 3, 4)) == {W1: Overlap(1, 2, 2, 4)}


def test_a_rank_without_the_first_block_is_not_named():
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(2, 3))
    assert answer(tree, array(1, 2, 3)) == {}


def test_hashes_at_both_ends_of_the_range_are_blocks_like_any():
    pair = Pair()
    ends = array(0, 2**64 - 1)
    pair.do("store", W1, Tier.DEVICE, ends)
    pair.do("store", W2, Tier.HOST, ends)
    pair.agree(ends, ends[::-1].copy())
    pair.do("remove", W1, Tier.DEVICE, array(0))
    pair.agree(ends, ends[::-1].copy())


def test_repeated_block_counts_once():
    pair = Pair()
    pair.do("store", W2, Tier.DEVICE, array(1, 2))
    for _ in range(2):
        pair.do("store", W1, Tier.DEVICE, array(1, 3, 1, 2, 3, 3))
        pair.agree(array(1, 2, 3))
    for _ in range(2):
        pair.do("remove", W1, Tier.DEVICE, array(2, 1, 2, 1))
        pair.agree(array(1, 2, 3), array(3))


def test_removing_an_absent_block_is_allowed():
    pair = Pair()
    pair.do("remove", W1, Tier.DEVICE, array(1))
    pair.do("clear", W1)
    pair.do("clear", W1, Tier.HOST)
    pair.do("store", W1, Tier.DEVICE, array(1, 2))
    pair.do("remove", W1, Tier.HOST, array(1, 2))
    pair.do("remove", W1, Tier.DEVICE, array(3, 2**64 - 1, 0))
    pair.do("remove", W2, Tier.DEVICE, array(1, 2))
    pair.do("clear", W1, Tier.HOST)
    pair.agree(array(1, 2))


def test_no_blocks_are_no_change():
    pair = Pair()
    pair.do("store", W1, Tier.DEVICE, array())
    pair.do("remove", W1, Tier.DEVICE, array())
    pair.do("stage", W2, Tier.DEVICE, array())
    pair.do("commit_staged", W2)
    pair.agree(array(), array(1))
    pair.do("clear", W1)
    pair.agree(array())
    assert pair.tree.stats().unswept_holders == 0


def test_arrays_may_be_read_only_and_unaligned():
    pair = Pair()
    packed = np.frombuffer(array(1, 2, 3).tobytes(), dtype="<u8")
    shifted = np.frombuffer(b"...." + packed.tobytes(), dtype="<u8", offset=4)
    pair.do("store", W1, Tier.DEVICE, packed)
    pair.do("stage", W2, Tier.DEVICE, shifted)
    pair.do("commit_staged", W2)
    pair.agree(packed, shifted)
    pair.do("remove", W1, Tier.DEVICE, shifted)
    pair.agree(packed)


@pytest.mark.parametrize("tier", [None, *Tier])
@pytest.mark.parametrize("is_swept", [False, True])
def test_a_cleared_tier_can_be_filled_at_once(tier, is_swept):
    """What was cleared neither comes back with the same block, nor is a new block swept."""
    pair = Pair()
    for each in Tier:
        pair.do("store", W1, each, span(each, 6 + each))
        pair.do("store", W2, each, span(2 * each, 8))
    pair.do("clear", W1, tier)
    if is_swept:
        sweep_all(pair.tree)
    pair.agree(span(0, 10), span(3, 10))
    pair.do("store", W1, tier or Tier.DEVICE, array(0, 1, 3))
    pair.agree(span(0, 10), span(3, 10))
    pair.do("remove", W1, tier or Tier.DEVICE, array(1, 2))
    pair.agree(span(0, 10), span(3, 10))
    sweep_all(pair.tree)
    pair.agree(span(0, 10), span(3, 10))
    assert pair.tree.block_count() == pair.oracle.block_count()


def test_one_round_of_a_sweep_is_enough():
    """Slots that move up while others are emptied are not passed over."""
    pair, random = Pair(max_blocks=20_000, sub_bits=7), np.random.default_rng(4)
    hashes = random.integers(0, 2**64, 16_000, np.uint64, endpoint=False)
    pair.do("store", W1, Tier.DEVICE, hashes[:15_000])
    pair.do("store", W1, Tier.HOST, hashes[14_000:])
    pair.do("clear", W1, Tier.DEVICE)
    assert not pair.tree.sweep(128)
    pair.agree(hashes[14_000:])
    pair.do("clear", W1)
    assert not pair.tree.sweep(128)
    assert pair.tree.block_count() == 0


def test_after_its_only_tier_is_cleared_a_rank_waits_for_no_sweep():
    pair = Pair()
    pair.do("store", W1, Tier.HOST, span(0, 20))
    pair.do("clear", W1, Tier.HOST)
    pair.do("store", W1, Tier.HOST, span(10, 30))
    assert pair.tree.stats().unswept_holders == 1
    pair.agree(span(10, 30))


def test_tiers_cleared_one_by_one():
    pair = Pair()
    for tier in Tier:
        pair.do("store", W1, tier, span(tier, 9))
        pair.do("store", W2, tier, span(tier, 9))
    for tier in (Tier.DISK, Tier.DEVICE, Tier.DISK, Tier.REMOTE, Tier.HOST):
        pair.do("clear", W1, tier)
        pair.agree(span(0, 9), span(3, 9))
        pair.tree.sweep(1)
        pair.agree(span(0, 9), span(3, 9))
    sweep_all(pair.tree)
    assert pair.tree.stats().unswept_holders == 0


def test_blocks_of_cleared_ranks_are_kept_until_they_are_swept():
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, span(0, 100))
    tree.store(W2, Tier.DEVICE, span(50, 60))
    tree.clear(W1)
    assert tree.block_count() == 100
    assert (tree.stats().unswept_holders, tree.stats().holder_sets) == (1, 1)
    assert tree.sweep(1)
    assert 10 < tree.block_count() < 100
    assert not tree.sweep(1)
    assert not tree.sweep(1)
    assert tree.block_count() == 10
    assert (tree.stats().unswept_holders, tree.stats().holder_sets) == (0, 0)


def test_the_id_of_a_cleared_rank_is_used_again_once_it_is_swept():
    """A rank with another's old id must not be credited with that one's blocks."""
    pair = Pair()
    pair.do("store", W1, Tier.DEVICE, span(0, 50))
    pair.do("clear", W1)
    pair.do("store", W2, Tier.DEVICE, span(0, 10))
    pair.agree(span(0, 50))
    used = pair.tree.holders.next_id
    sweep_all(pair.tree)
    for round_ in range(20):
        pair.do("store", W3, Tier.HOST, span(round_, 30))
        pair.agree(span(0, 50))
        pair.do("clear", W3)
        sweep_all(pair.tree)
    assert pair.tree.holders.next_id == used


@pytest.mark.parametrize(("sub_bits", "blocks"), [(1, 30_000), (12, 30_000)])
def test_growth_loses_nothing(sub_bits, blocks):
    pair, random = Pair(max_blocks=40_000, sub_bits=sub_bits), np.random.default_rng(3)
    hashes = random.integers(0, 2**64, blocks, np.uint64, endpoint=False)
    for start in range(0, blocks, 5000):
        pair.do("store", W1, Tier(start % 4), hashes[start : start + 5000])
        pair.do("store", W2, Tier.HOST, hashes[start : start + 2500])
    pair.agree(hashes, hashes[5000:], hashes[-5000:])
    assert pair.tree.block_count() == blocks
    pair.do("remove", W1, Tier.DEVICE, hashes[::3].copy())
    pair.do("clear", W2)
    sweep_all(pair.tree)
    pair.agree(hashes, hashes[1:], hashes[5000:])
    assert pair.tree.block_count() == pair.oracle.block_count()


def pages_of(tree):
    return tree.memory.blocks.capacity // int(_block_table.PAGE_SLOTS)


def fill(tree, ranks, blocks, seed=5):
    """Let `ranks` ranks hold `blocks` blocks each, all of them different."""
    random = np.random.default_rng(seed)
    for worker_id in range(ranks):
        hashes = random.integers(0, 2**64, blocks, np.uint64, endpoint=False)
        assert tree.stage(Rank(worker_id, 0), Tier.DEVICE, hashes)
        tree.commit_staged(Rank(worker_id, 0))


@pytest.mark.parametrize("ranks", [40, 400])
def test_growth_for_expected_ranks_ends_where_it_has_to(ranks):
    trees = [RadixTree(1 << 18, sub_bits=3), RadixTree(1 << 18, sub_bits=3)]
    trees[1].expect(ranks)
    for tree in trees:
        fill(tree, ranks, blocks=200_000 // ranks)
        tree.check_invariants()
    by_quarters, expected = (pages_of(tree).sum() for tree in trees)
    assert expected <= 1.1 * by_quarters


def test_with_expected_ranks_sub_tables_grow_less_often():
    tree, sizes = RadixTree(1 << 18, sub_bits=3), set()
    tree.expect(100)
    random = np.random.default_rng(5)
    for worker_id in range(100):
        for _ in range(10):
            hashes = random.integers(0, 2**64, 200, np.uint64, endpoint=False)
            tree.stage(Rank(worker_id, 0), Tier.DEVICE, hashes)
            sizes.add(int(pages_of(tree)[0]))
        tree.commit_staged(Rank(worker_id, 0))
    assert len(sizes) < 11  # by quarters it were 16


def test_expected_growth_is_bounded_by_the_limit():
    tree = RadixTree(40_000, sub_bits=3)
    tree.expect(10**9)
    fill(tree, ranks=1, blocks=39_000)
    tree.check_invariants()
    assert pages_of(tree).max() <= 40_000 // 8 // 192 * 5 // 4 + 2
    fill(tree, ranks=1, blocks=1000, seed=6)
    sweep_all(tree)
    tree.check_invariants()


def test_withdrawn_expectation_reserves_no_room():
    trees = [RadixTree(1 << 18, sub_bits=3), RadixTree(1 << 18, sub_bits=3)]
    trees[1].expect(1000)
    trees[1].expect(0)
    for tree in trees:
        fill(tree, ranks=3, blocks=10_000)
    assert np.array_equal(*map(pages_of, trees))


def test_known_blocks_can_be_stored_at_the_limit():
    tree = small_tree(1000)
    assert tree.store(W1, Tier.DEVICE, span(0, 1000))
    assert not tree.store(W1, Tier.DEVICE, span(1000, 1001))
    assert tree.store(W2, Tier.HOST, span(0, 1000))
    assert not tree.store(W2, Tier.HOST, span(990, 1010))
    assert answer(tree, span(0, 1001)) == {
        W1: Overlap(1000, 1000, 1000, 1000),
        W2: Overlap(0, 1000, 1000, 1000),
    }
    tree.check_invariants()


def test_the_limit_stops_a_store_where_it_is_reached():
    tree = small_tree(1000)
    assert not tree.store(W1, Tier.DEVICE, span(0, 1500))
    assert tree.summary(W1) == HeldSummary((1000, 0, 0, 0), (digest(span(0, 1000)), 0, 0, 0))
    assert not tree.store(W2, Tier.DEVICE, array(3, 2000, 4))
    assert answer(tree, array(3, 4)) == {W1: Overlap(2, 2, 2, 2), W2: Overlap(1, 1, 1, 1)}
    tree.check_invariants()


def test_removal_makes_room():
    tree = small_tree(1000)
    assert tree.store(W1, Tier.DEVICE, span(0, 1000))
    assert not tree.stage(W2, Tier.DEVICE, span(5000, 5001))
    assert tree.remove(W1, Tier.DEVICE, span(300, 400))
    assert tree.stage(W2, Tier.DEVICE, span(5000, 5100))
    assert not tree.store(W3, Tier.DEVICE, span(6000, 6001))
    tree.drop_staged(W2)
    sweep_all(tree)
    assert tree.store(W3, Tier.DEVICE, span(6000, 6100))
    tree.clear(W1)
    sweep_all(tree)
    assert tree.store(W2, Tier.DEVICE, span(7000, 7900))
    assert tree.block_count() == 1000
    assert not tree.store(W2, Tier.DEVICE, span(7900, 7901))
    tree.check_invariants()


def test_every_block_may_be_held_by_others():
    """As many sets as blocks: none can be added before another is given up."""
    masks = list(product(range(1, 16), range(1, 16), range(3, 16, 2)))[:1024]
    pair = Pair(max_blocks=len(masks))
    for i, rank in enumerate((W1, W2, W3)):
        for tier in Tier:
            blocks = [block for block, mask in enumerate(masks) if mask[i] >> tier & 1]
            pair.do("store", rank, tier, array(*blocks))
    assert pair.tree.stats().holder_sets == pair.tree.stats().blocks == 1024
    pair.agree(array(1000), span(500, 520))
    pair.do("clear", W3, Tier.DEVICE)
    pair.do("remove", W1, Tier.HOST, span(0, 1024))
    pair.do("store", W3, Tier.DEVICE, span(0, 1024))
    pair.agree(array(1000), span(500, 520))
    for rank in (W2, W1, W3):
        pair.do("clear", rank)
        sweep_all(pair.tree)
        pair.agree(array(1000), span(500, 520))
    assert (pair.tree.stats().holder_sets, pair.tree.block_count()) == (0, 0)


def test_without_room_for_sets_an_index_can_still_be_swept():
    """Blocks held by all ranks but one: large sets, each of them different."""
    tree = small_tree(1000)
    ranks = [Rank(i, 0) for i in range(500)]
    everywhere = span(0, 500)
    is_stored = [
        tree.store(rank, Tier.DEVICE, np.delete(everywhere, i)) for i, rank in enumerate(ranks)
    ]
    tree.check_invariants()
    assert is_stored[0]
    assert not all(is_stored)
    first_refused = is_stored.index(False)
    assert tree.summary(ranks[first_refused - 1]).counts == (499, 0, 0, 0)
    for rank in ranks[:100]:
        tree.clear(rank)
    sweep_all(tree)
    tree.check_invariants()
    assert tree.stats().unswept_holders == 0
    assert set(answer(tree, array(499))) == {
        rank for rank in ranks[100:] if tree.summary(rank).counts[0] == 499
    }
    for rank in ranks:
        tree.clear(rank)
    sweep_all(tree)
    tree.check_invariants()
    assert (tree.stats().holder_sets, tree.block_count()) == (0, 0)
    assert all(tree.store(rank, Tier.DEVICE, everywhere) for rank in ranks)
    tree.check_invariants()


def test_without_holder_ids_ranks_are_refused_until_one_is_free():
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1))
    for i in range(MAX_HOLDERS - 1):
        assert tree.stage(Rank(9, i), Tier.DEVICE, array())
    assert not tree.store(W2, Tier.DEVICE, array(1))
    assert not tree.stage(W2, Tier.DEVICE, array(1))
    assert tree.store(W1, Tier.DEVICE, array(2))
    tree.check_invariants()
    tree.clear(W1)
    assert not tree.store(W2, Tier.DEVICE, array(1))
    sweep_all(tree)
    assert tree.store(W2, Tier.DEVICE, array(1))
    tree.drop_staged(Rank(9, 7))
    assert tree.store(W1, Tier.DEVICE, array(1))
    assert set(answer(tree, array(1))) == {W1, W2}
    tree.check_invariants()


def test_staged_blocks_are_visible_after_commit():
    pair = Pair()
    pair.do("store", W1, Tier.DEVICE, array(1, 2, 3))
    pair.do("stage", W1, Tier.DEVICE, array(1, 4))
    pair.do("stage", W1, Tier.HOST, array(4, 5))
    pair.do("stage", W2, Tier.HOST, array(1))
    pair.agree(array(1, 2, 3), array(1, 4, 5))
    pair.do("store", W1, Tier.REMOTE, array(4))
    pair.do("commit_staged", W1)
    pair.agree(array(1, 2, 3), array(1, 4, 5))
    sweep_all(pair.tree)
    pair.agree(array(1, 2, 3), array(1, 4, 5))
    pair.do("commit_staged", W2)
    pair.agree(array(1, 2, 3), array(1, 4, 5))


def test_staged_blocks_can_be_dropped():
    pair = Pair()
    pair.do("store", W1, Tier.DEVICE, array(1, 2, 3))
    pair.do("stage", W1, Tier.DEVICE, array(1, 4))
    pair.do("drop_staged", W1)
    pair.do("drop_staged", W2)
    pair.agree(array(1, 2, 3), array(1, 4))
    pair.do("stage", W1, Tier.HOST, array(1, 5))
    pair.do("commit_staged", W1)
    sweep_all(pair.tree)
    pair.agree(array(1, 2, 3), array(1, 5))
    assert pair.tree.block_count() == 2


def test_a_commit_of_nothing_leaves_nothing():
    pair = Pair()
    pair.do("store", W1, Tier.DEVICE, array(1, 2, 3))
    pair.do("commit_staged", W1)
    pair.do("commit_staged", W2)
    pair.agree(array(1))


def test_a_check_names_the_ranks_that_differ():
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1, 2))
    tree.store(W2, Tier.HOST, array(1, 2))
    right = HeldSummary((2, 0, 0, 0), (digest(array(2, 1)), 0, 0, 0))
    tree.check(W1, right)
    tree.check(W2, right)
    tree.check(W3, NOTHING_HELD)
    tree.check(W3, right)
    assert tree.take_differing() == [W2, W3]
    assert tree.take_differing() == []


def said(index, rank, holes=NO_HOLES):
    """What a rank says of itself that holds what the index shows."""
    summary = index.summary(rank)
    return HeldState(holes, summary.counts, summary.digests)


def batch(state, *events):
    packed = pack_batch(state, events)
    return EventBatch(W1.worker_id, W1.dp_rank, 1, IDENTITY, 1, len(events), packed)


def stored(tier, hashes):
    return Stored(tier, pack_hashes(hashes))


def removed(tier, hashes):
    return Removed(tier, pack_hashes(hashes))


EVENTS = [
    stored(Tier.DEVICE, span(0, 20)),
    stored(Tier.HOST, span(0, 10)),
    removed(Tier.DEVICE, span(15, 30)),
    stored(Tier.DEVICE, array()),
    Cleared(Tier.HOST),
    Cleared(Tier.REMOTE),
    stored(Tier.HOST, span(3, 30)),
    removed(Tier.DISK, span(3, 30)),
    Cleared(None),
    Cleared(None),
    stored(Tier.DISK, span(0, 40)),
    stored(Tier.DEVICE, span(0, 2)),
    Cleared(Tier.DEVICE),
]


@pytest.mark.parametrize("room", [1, 7, 20, 10**6])
@pytest.mark.parametrize("count", range(1, len(EVENTS) + 1))
def test_a_batch_is_applied_in_slices(count, room):
    """With whatever event it ends; others' blocks stay."""
    pair, slices = Pair(), 0
    pair.do("store", W2, Tier.DEVICE, span(0, 25))
    events, expected = EVENTS[:count], ExactIndex()
    expected.apply(W1, batch(HeldState(), *events), 0, room)
    whole = batch(said(expected, W1), *events)
    assert pair.oracle.apply(W1, whole, 0, room) == DONE
    progress = 0
    while (progress := pair.tree.apply(W1, whole, progress, room)) not in (DONE, DIFFERENT):
        assert progress > 0
        slices += 1
    assert progress == DONE
    assert (slices == 0) == (room == 10**6 or (count < 2 and room == 20))
    pair.agree(span(0, 40))
    assert pair.tree.holders.rows[pair.tree.holders.ids[W1], int(_holder_sets.CLOSED)] == 15


def test_a_batch_that_does_not_add_up_differs():
    tree, event = small_tree(), stored(Tier.DEVICE, span(0, 5))
    assert tree.apply(W1, batch(HeldState(), event), 0, 100) == DIFFERENT
    assert device(tree, W1, span(0, 9)) == 5
    right = said(tree, W1)
    for wrong in (
        HeldState(NO_HOLES, (5, 0, 0, 1), right.digests),
        HeldState(NO_HOLES, right.counts, (right.digests[0], 0, 0, 1)),
        HeldState(NO_HOLES, (0, 5, 0, 0), (0, right.digests[0], 0, 0)),
    ):
        assert tree.apply(W1, batch(wrong, event), 0, 100) == DIFFERENT
    assert tree.apply(W1, batch(right, event), 0, 100) == DONE


def test_batch_reports_its_holes():
    tree = small_tree()
    tree.store(W1, Tier.HOST, span(0, 100))
    tree.store(W1, Tier.DEVICE, array(0))
    event = stored(Tier.DEVICE, np.delete(span(0, 100), 50))
    tree.apply(W1, batch(HeldState((1, 0, 0, 0)), event), 0, 1000)
    assert answer(tree, span(0, 100)) == {W1: Overlap(50, 100, 100, 100)}
    tree.apply(W1, batch(HeldState(NO_HOLES), event), 0, 1000)
    assert answer(tree, span(0, 100)) == {W1: Overlap(100, 100, 100, 100)}


def test_rank_found_wrong_is_not_trusted_within_a_batch():
    tree = small_tree(check_interval=1)
    lie(tree)
    assert device(tree, W1, span(0, 100)) == 50
    assert tree.apply(W1, batch(said(tree, W1), stored(Tier.DEVICE, array(0))), 0, 10) == DONE
    assert device(tree, W1, span(0, 100)) == 50
    assert tree.stats().differing_answers == 1


MALFORMED = [
    *[(0, 0, 0, 1), (4, 0, 0, 1), (1, 4, 0, 1), (2, 255, 0, 1), (3, 4, 0, 0), (3, 0, 0, 1)],
    *[(1, 0, 1, 1), (1, 0, 0, 2), (1, 0, 0, 0), (1, 0, 0, 2**32 - 1)],
]
"""Kind, tier, zero and blocks of an event that is followed by one block."""


@pytest.mark.parametrize("words", MALFORMED)
def test_a_malformed_batch_changes_nothing(words):
    pair = Pair()
    pair.do("store", W1, Tier.DEVICE, span(0, 5))
    kind, tier, zero, blocks = words
    head = array(kind | tier << 8 | zero << 16 | blocks << 32, 7).tobytes()
    good = batch(said(pair.tree, W1), stored(Tier.DEVICE, span(0, 9)))
    for bad in (
        replace(good, last_event_id=2, packed=good.packed + head),
        replace(good, last_event_id=2),
        replace(good, packed=good.packed[:-8]),
        replace(good, packed=good.packed[:-1]),
        replace(good, packed=good.packed[:40]),
        replace(good, packed=good.packed[:96]),
    ):
        with pytest.raises(WireError):
            pair.tree.apply(W1, bad, 0, 100)
    pair.agree(span(0, 9))


def test_a_batch_without_room_is_refused():
    tree = small_tree(1000)
    tree.store(W2, Tier.DEVICE, span(0, 990))
    events = [
        Cleared(None),
        stored(Tier.DEVICE, span(985, 1005)),
        removed(Tier.DEVICE, span(0, 10)),
    ]
    assert tree.apply(W1, batch(HeldState(), *events), 0, 100) == REFUSED
    assert tree.summary(W1).counts == (15, 0, 0, 0)
    tree.check_invariants()


class Cache:
    """A rank as its agent knows it: paths of a forest, held and given up as engines do."""

    def __init__(self, pair, rank, paths):
        self.pair, self.rank, self.paths = pair, rank, paths
        self.held = HeldBlocks()

    def store(self, random):
        path, tier = random.choice(self.paths), random.choice([Tier.DEVICE, *Tier])
        end = random.randint(1, len(path))
        start = random.choice([0, 0, 0, random.randrange(end)])
        self.held.store(tier, path[start:end], path[start - 1] if start else None)
        self.pair.do("store", self.rank, tier, array(*path[start:end]))

    def remove(self, random):
        path, tier = random.choice(self.paths), random.choice([Tier.DEVICE, *Tier])
        start = random.randrange(len(path))
        end = random.choice([len(path)] * 3 + [start + 1])
        self.held.remove(tier, path[start:end])
        self.pair.do("remove", self.rank, tier, array(*path[start:end]))

    def clear(self, random):
        tier = random.choice([None, *Tier])
        self.held.clear(tier)
        self.pair.do("clear", self.rank, tier)

    def note_holes(self):
        self.pair.tree.note_holes(self.rank, self.held.state().holes)


def forest(random, paths):
    """Paths that share prefixes: each leaves another somewhere."""
    grown = [[random.getrandbits(64) for _ in range(60)]]
    for _ in range(paths - 1):
        trunk = random.choice(grown)[: random.randrange(60)]
        grown.append([*trunk, *(random.getrandbits(64) for _ in range(random.randint(1, 40)))])
    return grown


@pytest.mark.parametrize("seed", range(12))
def test_searches_that_jump_over_blocks_answer_as_the_definition(seed):
    """True claims, of some tiers or of all, of some ranks or of all."""
    random, pair = Random(seed), Pair(check_interval=random_interval(seed))
    paths = forest(random, 6)
    caches = [Cache(pair, Rank(i, 0), paths) for i in range(6)]
    for _ in range(150):
        cache = random.choice(caches)
        random.choices([cache.store, cache.remove, cache.clear], [6, 4, 0.3])[0](random)
        if random.random() < 0.3:
            pair.tree.sweep(1)
        for each in caches if random.random() < 0.8 else [cache]:
            each.note_holes()
        prompt = array(*random.choice(paths), *[random.getrandbits(64)] * random.randrange(3))
        for start in (0, random.randrange(len(prompt))):
            assert answer(pair.tree, prompt[start:]) == pair.oracle.find_matches(prompt[start:])
    pair.agree()
    assert pair.tree.stats().differing_answers == 0


@pytest.mark.parametrize("joining", [0, 9])
@pytest.mark.parametrize("moves", [False, True])
def test_several_ranks_may_leave_where_others_join_or_change_their_tier(joining, moves):
    """Lengths 20, 20, 10, 10 and 5; another holds what is behind 10, and one moves there."""
    pair = Pair()
    lengths = {1: 20, 2: 20, 3: 10, 4: 10, 5: 5}
    if not joining:
        pair.do("store", Rank(0, 0), Tier.DEVICE, span(11, 21))
    for worker_id, length in lengths.items():
        pair.do("store", Rank(worker_id, 0), Tier.DEVICE, span(1, 1 + length))
    if joining:
        pair.do("store", Rank(joining, 0), Tier.DEVICE, span(11, 21))
    if moves:
        pair.do("remove", Rank(2, 0), Tier.DEVICE, span(11, 21))
        pair.do("store", Rank(2, 0), Tier.HOST, span(11, 21))
    for worker_id in lengths:
        pair.tree.note_holes(Rank(worker_id, 0), NO_HOLES)
    pair.agree(span(1, 21), span(1, 16), span(6, 21))


def test_many_ranks_may_leave_where_few_left_before_and_after():
    pair, lengths = Pair(), [3, 5, 5, *[8] * 30, 9, *[12] * 20, 14, 20]
    for worker_id, length in enumerate(lengths):
        pair.do("store", Rank(worker_id, 0), Tier.DEVICE, span(1, 1 + length))
        pair.tree.note_holes(Rank(worker_id, 0), NO_HOLES)
    pair.agree(span(1, 21), span(1, 9), span(1, 13))


def random_interval(seed):
    return NEVER if seed % 3 else 2


def test_without_a_claim_holes_are_found():
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, span(0, 100))
    tree.note_holes(W1, NO_HOLES)
    assert device(tree, W1, span(0, 200)) == 100
    tree.store(W1, Tier.DEVICE, span(150, 200))
    assert device(tree, W1, span(0, 200)) == 100
    tree.note_holes(W1, NO_HOLES)
    tree.remove(W1, Tier.DEVICE, array(50))
    assert device(tree, W1, span(0, 100)) == 50
    tree.note_holes(W1, (2, 2, 2, 2))
    assert device(tree, W1, span(0, 100)) == 50
    tree.store(W1, Tier.HOST, array(50, *range(100, 150)))
    tree.note_holes(W1, (2, 0, 0, 0))
    assert answer(tree, span(0, 100)) == {W1: Overlap(50, 100, 100, 100)}
    tree.note_holes(W1, None)
    assert answer(tree, span(0, 100)) == {W1: Overlap(50, 100, 100, 100)}


def test_claims_of_unknown_ranks_are_passed_over():
    tree = small_tree()
    tree.note_holes(W1, NO_HOLES)
    tree.store(W1, Tier.DEVICE, array(1, 3))
    assert device(tree, W1, array(1, 2, 3)) == 1
    tree.check_invariants()


def lie(tree):
    """Two ranks, one of which claims not to have the hole that it has."""
    tree.store(W1, Tier.DEVICE, np.delete(span(0, 100), 50))
    tree.store(W2, Tier.DEVICE, span(0, 70))
    tree.note_holes(W1, NO_HOLES)
    tree.note_holes(W2, NO_HOLES)


def test_a_wrong_claim_is_found_out_by_the_first_check():
    tree = small_tree(check_interval=2)
    lie(tree)
    assert device(tree, W1, span(0, 100)) == 100
    assert device(tree, W1, span(0, 100)) == 50
    assert (tree.stats().checked_answers, tree.stats().differing_answers) == (1, 1)
    tree.note_holes(W1, NO_HOLES)
    for _ in range(4):
        assert answer(tree, span(0, 100)) == {
            W1: Overlap(50, 50, 50, 50),
            W2: Overlap(70, 70, 70, 70),
        }
    assert (tree.stats().checked_answers, tree.stats().differing_answers) == (3, 1)
    tree.check_invariants()


def test_verifying_every_answer_gives_none_wrong():
    tree = small_tree(check_interval=1)
    lie(tree)
    for _ in range(3):
        tree.note_holes(W1, NO_HOLES)
        assert device(tree, W1, span(0, 100)) == 50
    assert (tree.stats().checked_answers, tree.stats().differing_answers) == (3, 1)


def test_rank_found_wrong_is_trusted_in_its_next_life():
    tree = small_tree(check_interval=1)
    lie(tree)
    assert device(tree, W1, span(0, 100)) == 50
    tree.stage(W1, Tier.DEVICE, span(0, 80))
    tree.commit_staged(W1)
    tree.note_holes(W1, NO_HOLES)
    tree.check_invariants()
    assert tree.holders.rows[tree.holders.ids[W1], int(_holder_sets.CLOSED)] == 15
    assert device(tree, W1, span(0, 100)) == 80


def test_stats():
    tree = small_tree(1234, check_interval=3)
    tree.store(W1, Tier.DEVICE, span(0, 10))
    tree.store(W2, Tier.DEVICE, span(5, 15))
    tree.stage(W3, Tier.HOST, span(20, 30))
    for _ in range(7):
        tree.find_matches(span(0, 10))
    stats = tree.stats()
    assert (stats.blocks, stats.max_blocks, stats.holder_sets) == (25, 1234, 1)
    assert (stats.checked_answers, stats.differing_answers, stats.unswept_holders) == (2, 0, 0)
    tree.clear(W1)
    tree.clear(W2, Tier.HOST)
    assert tree.stats().unswept_holders == 1


def test_a_dump_is_as_of_its_call():
    tree = small_tree()
    for rank in (W1, W2):
        tree.store(rank, Tier.DEVICE, array(1, 2, 3))
    dumped = tree.dump()
    for rank in (W1, W2):
        tree.clear(rank)
    sweep_all(tree)
    tree.store(W3, Tier.HOST, array(4))
    assert {(each.rank, each.tier): sorted(each.sequence_hashes.tolist()) for each in dumped} == {
        (W1, Tier.DEVICE): [1, 2, 3],
        (W2, Tier.DEVICE): [1, 2, 3],
    }


def test_a_dump_shows_neither_cleared_nor_staged_blocks():
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1, 2))
    tree.store(W1, Tier.HOST, array(2, 3))
    tree.store(W2, Tier.DEVICE, array(1))
    tree.stage(W3, Tier.DEVICE, array(1, 5))
    tree.clear(W1, Tier.DEVICE)
    tree.clear(W2)
    assert held(tree) == {(W1, Tier.HOST): [2, 3]}


@pytest.fixture
def slice_by_slice(monkeypatch):
    """Every sub-table is a slice of its own."""
    monkeypatch.setattr(radix_tree, "DUMP_ROWS", 1)


def test_a_dump_in_slices_misses_nothing_that_stays(slice_by_slice):
    """Between slices the table grows, ranks go, and their ids get others."""
    tree, hashes = small_tree(sub_bits=3), np.random.default_rng(1).permutation(span(1, 3000))
    staying, coming, going = hashes[:500], hashes[500:2500], hashes[2500:]
    tree.store(W1, Tier.DEVICE, staying)
    tree.store(W2, Tier.HOST, going)
    tree.store(W2, Tier.DEVICE, staying[:100])
    tree.store(W3, Tier.DISK, staying[:1])
    slices = []
    for i, part in enumerate(tree.dump_slices()):
        slices.append(part)
        tree.store(W3, Tier.DEVICE, coming[i * 100 : i * 100 + 100])
        if i == 5:
            tree.clear(W2)
            sweep_all(tree)
            tree.store(Rank(7, 0), Tier.REMOTE, staying)
    assert len(slices) == 8
    seen = {(b.rank, b.tier): b.sequence_hashes.tolist() for b in blocks_by_rank(slices)}
    assert sorted(seen[W1, Tier.DEVICE]) == sorted(staying.tolist())
    assert set(seen[W2, Tier.DEVICE]) < set(staying[:100].tolist())
    assert 0 < len(seen[W3, Tier.DEVICE]) < 800
    assert set(seen[W3, Tier.DEVICE]) < set(coming.tolist())
    assert {rank for rank, _ in seen} == {W1, W2, W3}
    assert all(len(blocks) == len(set(blocks)) for blocks in seen.values())


@pytest.mark.parametrize("rows", [1, 300, 10_000])
def test_slices_add_up_to_a_dump(rows, monkeypatch):
    monkeypatch.setattr(radix_tree, "DUMP_ROWS", rows)
    tree = small_tree(sub_bits=4)
    tree.store(W1, Tier.DEVICE, span(0, 1000))
    tree.store(W2, Tier.HOST, span(500, 1500))
    tree.store(W2, Tier.DISK, span(500, 600))
    slices = list(tree.dump_slices())
    assert (len(slices) == 1) is (rows == 10_000)
    seen = {(b.rank, b.tier): sorted(b.sequence_hashes.tolist()) for b in blocks_by_rank(slices)}
    assert seen == {
        (W1, Tier.DEVICE): list(range(1000)),
        (W2, Tier.HOST): list(range(500, 1500)),
        (W2, Tier.DISK): list(range(500, 600)),
    }


def test_answers_read_as_mappings():
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1, 2))
    tree.store(W2, Tier.HOST, array(1))
    matches = tree.find_matches(array(1, 2))
    assert len(matches) == 2
    assert set(matches) == {W1, W2}
    assert matches[W2] == matches.get(W2, NO_OVERLAP) == Overlap(0, 1, 1, 1)
    assert matches.get(W3, NO_OVERLAP) is NO_OVERLAP
    assert dict(matches.items()) == {W1: Overlap(2, 2, 2, 2), W2: Overlap(0, 1, 1, 1)}
    assert W1 in matches
    assert W3 not in matches
    with pytest.raises(KeyError):
        matches[W3]
    assert not tree.find_matches(array(3))


def test_answers_stay_as_they_were():
    """Read only after the ids of the ranks in it went to others."""
    tree = small_tree()
    tree.store(W1, Tier.DEVICE, array(1, 2))
    tree.store(W2, Tier.HOST, array(1))
    before = tree.find_matches(array(1, 2))
    tree.clear(W1)
    tree.clear(W2)
    sweep_all(tree)
    for i in range(4):
        tree.store(Rank(10 + i, 0), Tier.DEVICE, array(1, 2, 3))
    assert len(tree.find_matches(array(1))) == 4
    assert dict(before.items()) == {W1: Overlap(2, 2, 2, 2), W2: Overlap(0, 1, 1, 1)}


def test_a_thousand_ranks_hold_a_block():
    pair, random = Pair(), Random(1)
    ranks = [Rank(i // 8, i % 8) for i in range(1000)]
    random.shuffle(ranks)
    for i, rank in enumerate(ranks):
        pair.do("store", rank, Tier(i % 4), array(7, *range(i % 5)))
    prompt = array(7, 0, 1, 2, 3)
    assert len(pair.tree.find_matches(prompt)) == 1000
    pair.agree(prompt)
    for i, rank in enumerate(ranks[:600]):
        pair.do("remove", rank, Tier(i % 4), array(7, 2))
    for rank in ranks[500:700]:
        pair.do("clear", rank)
    pair.agree(prompt, prompt[1:])
    sweep_all(pair.tree)
    pair.agree(prompt, prompt[1:])


def test_sets_are_freed_with_their_last_block():
    """Thousands of sets, three times over: the third time takes no more room than the second."""
    tree = small_tree()
    rooms = []
    for _ in range(3):
        random = Random(5)
        for _ in range(600):
            rank, tier = Rank(random.randrange(12), 0), Tier(random.randrange(4))
            blocks = array(*random.sample(range(2000), 200))
            assert random.choice([tree.store, tree.store, tree.remove])(rank, tier, blocks)
        assert tree.stats().holder_sets > 1000
        tree.check_invariants()
        for i in range(12):
            tree.clear(Rank(i, 0))
        sweep_all(tree)
        tree.check_invariants()
        assert (tree.stats().holder_sets, tree.block_count()) == (0, 0)
        rooms.append(
            [int(tree.memory.state[w]) for w in (_holder_sets.NEXT_SET, _holder_sets.NEXT_MEMBER)]
        )
    assert rooms[2] == rooms[1]


@pytest.mark.parametrize("spreads", [range(150), range(END - 15, END), range(END, END + 150)])
def test_keys_that_crowd_one_place_are_kept_apart(spreads):
    """All have one home slot: every search passes the others, every removal moves them."""
    pair, random = Pair(), Random(2)
    keys = [key_spread_to(spread) for spread in spreads]
    for _ in range(4):
        random.shuffle(keys)
        pair.do("store", W1, Tier.DEVICE, array(*keys))
        pair.do("store", W2, Tier.HOST, array(*keys[::2]))
        pair.agree(array(*keys), array(*keys[::2]))
        random.shuffle(keys)
        for key in keys[: len(keys) // 2]:
            pair.do("remove", W1, Tier.DEVICE, array(key))
            pair.tree.check_invariants()
        pair.agree(array(*keys), *(array(key) for key in keys))
        pair.do("clear", W2)
        pair.tree.sweep(2)
        pair.agree(array(*keys), *(array(key) for key in keys))


def test_keys_that_crowd_the_end_of_a_sub_table_make_it_grow():
    pair, random = Pair(), Random(3)
    keys = [key_spread_to(END - 1 - i * 2**52) for i in range(60)]
    random.shuffle(keys)
    for i, key in enumerate(keys):
        pair.do("store", W1, Tier.DEVICE, array(key))
        pair.do("store", W2, Tier.DEVICE, array(i))
        pair.agree(array(*keys))
    assert pair.tree.memory.blocks.capacity[0] > 256
    for key in keys:
        pair.do("remove", W1, Tier.DEVICE, array(key))
        pair.agree(array(*keys))


def test_keys_for_which_no_growth_makes_room_are_refused():
    """An attacker that knows the multiplier could choose such keys."""
    tree = small_tree()
    tree.store(W2, Tier.DEVICE, span(0, 100))
    keys = array(*(key_spread_to(END - 1 - i) for i in range(20)))
    assert not tree.store(W1, Tier.DEVICE, keys)
    assert tree.summary(W1).counts[Tier.DEVICE] < 20
    assert device(tree, W2, span(0, 100)) == 100
    tree.check_invariants()
    assert tree.remove(W1, Tier.DEVICE, keys)
    assert tree.summary(W1) == NOTHING_HELD
    tree.check_invariants()


@given(
    st.lists(
        st.tuples(
            st.builds(Rank, st.integers(0, 2), st.integers(0, 1)),
            st.sampled_from(Tier),
            st.integers(0, 3),
            st.integers(0, 30),
        ),
        max_size=30,
    ),
    st.integers(0, 3),
)
def test_real_prompts_sharing_prefixes(stored, asked):
    """Chains of hashes, four prompts that part at different depths."""
    prompts = [chain(array(*range(8), *range(100 * p, 100 * p + 24))) for p in range(4)]
    pair = Pair()
    for rank, tier, prompt, length in stored:
        pair.do("store", rank, tier, prompts[prompt][:length])
    pair.agree(prompts[asked])
