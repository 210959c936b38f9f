"""Terms of candidates: what the index, the bookings and the engine's rule make of a prompt."""

import numpy as np
import pytest

from router.indexer.base import Overlap
from router.indexer.radix_tree import RadixTree
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.requests import PromptRequest
from router.protocol.values import SCHEME, Identity, Rank, Tier
from router.scheduler.candidates import Candidates, Narrowing
from router.scheduler.terms import (
    CACHED_BLOCKS,
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    Terms,
)
from router.scheduler.weighing import Weighing
from router.sequence.prompt import Prompt
from router.sequence.rank_table import BLOCK_SIZE, EAGLE, HELD_BLOCKS, RankTable
from router.sequence.tracker import Tracker

FOUR, EIGHT = Identity(SCHEME, 4), Identity(SCHEME, 8)
A, B, C = Rank(1, 0), Rank(2, 0), Rank(3, 0)
REQUEST = PromptRequest(token_ids=list(range(20)))


class World:
    """A table, a tracker, and workers with one rank each."""

    def __init__(self, **identities):
        self.table = RankTable()
        self.tracker = Tracker(1.0, self.table)
        self.weighing = Weighing(self.table, self.tracker)
        self.prompt = Prompt(REQUEST)
        self.workers = [
            self._worker(*each) for each in zip((A, B, C), identities.values(), strict=False)
        ]

    def _worker(self, rank, identity):
        self.table.add(rank)
        row = self.table.row(rank)
        row[BLOCK_SIZE], row[EAGLE], row[HELD_BLOCKS] = identity.block_size, identity.eagle, 50
        return WorkerAnnouncement(
            worker_id=rank.worker_id, name="w", endpoint="http://w", identity=identity,
            total_kv_blocks=9, max_num_batched_tokens=9, incarnation=1,
        )  # fmt: skip

    def candidates(self):
        return Candidates.of(self.workers, self.table)

    def weigh(self, overlaps, candidates=None):
        candidates = self.candidates() if candidates is None else candidates
        return self.weighing.weigh(REQUEST, self.prompt, candidates, overlaps, None, 0.0)


@pytest.fixture
def world():
    return World(a=FOUR, b=EIGHT)


def test_weighs_each_candidate_under_its_own_identity(world):
    booked = world.prompt.hashed(EIGHT).footprint(0)
    world.tracker.book("x", B, booked, now_s=0.0)
    table = world.weigh({FOUR: {A: Overlap(5, 5, 5, 5)}, EIGHT: {B: Overlap(1, 2, 2, 2)}})
    assert [table.terms(i) for i in range(2)] == [
        Terms(A, 4, 5, 4, 0, 5, 50),
        Terms(B, 8, 1, 2, 20 + 12, 3 + 1, 50),
    ]
    assert table.column(OVERLAP_HOST).tolist() == [5, 2]


def test_nothing_is_left_over_for_the_next_decision(world):
    world.tracker.book("x", A, world.prompt.hashed(FOUR).footprint(0), now_s=0.0)
    world.weigh({FOUR: {A: Overlap(5, 5, 5, 5)}, EIGHT: {}})
    world.tracker.free("x", 0.0)
    table = world.weigh({FOUR: {}, EIGHT: {}})
    assert not table.values[:, OVERLAP_DEVICE : CACHED_BLOCKS + 1].any()
    assert table.column(NEW_BLOCKS).tolist() == [5, 3]


@pytest.mark.parametrize(("overlap", "cached"), [(0, 0), (3, 3), (5, 4)])
def test_the_engine_computes_at_least_one_token(world, overlap, cached):
    table = world.weigh({FOUR: {A: Overlap(*[overlap] * 4)}, EIGHT: {}})
    assert table.column(CACHED_BLOCKS)[0] == cached


def test_eagle_costs_a_block():
    eagle = Identity(SCHEME, 4, eagle=True)
    world = World(a=eagle)
    found = {eagle: {A: Overlap(4, 4, 4, 4)}}
    assert world.weigh(found).column(CACHED_BLOCKS).tolist() == [3]
    assert world.weigh({eagle: {}}).column(CACHED_BLOCKS).tolist() == [0]


def test_matches_of_a_tree_are_those_of_its_mapping():
    world = World(a=FOUR, b=FOUR, c=FOUR)
    tree, hashes = RadixTree(), world.prompt.hashed(FOUR).sequence_hashes
    tree.store(C, Tier.DEVICE, hashes[:2])
    tree.store(C, Tier.DISK, hashes)
    tree.store(A, Tier.HOST, hashes[:4])
    tree.store(Rank(99, 0), Tier.DEVICE, hashes)
    found = tree.find_matches(hashes)
    fast, slow = world.weigh({FOUR: found}), world.weigh({FOUR: dict(found.items())})
    assert np.array_equal(fast.values, slow.values)
    assert fast.column(OVERLAP_DEVICE).tolist() == [0, 0, 2]
    assert fast.column(OVERLAP_HOST).tolist() == [4, 0, 2]
    assert fast.column(OVERLAP_DISK).tolist() == [4, 0, 5]


def test_a_rank_that_comes_later_is_found_too():
    world = World(a=FOUR)
    tree, hashes = RadixTree(), world.prompt.hashed(FOUR).sequence_hashes
    tree.store(A, Tier.DEVICE, hashes)
    world.weigh({FOUR: tree.find_matches(hashes)})
    world.workers.append(world._worker(B, FOUR))
    tree.store(B, Tier.DEVICE, hashes[:3])
    table = world.weigh({FOUR: tree.find_matches(hashes)})
    assert table.column(OVERLAP_DEVICE).tolist() == [5, 3]


def test_some_candidates_only(world):
    some = Narrowing(world.candidates()).only(np.array([False, True]))
    table = world.weigh({EIGHT: {B: Overlap(2, 2, 2, 2)}}, some)
    assert (table.ranks, len(table)) == ((B,), 1)
    assert table.terms(0).overlap_blocks == 2
    assert (table.find(B), table.find(A)) == (0, None)
