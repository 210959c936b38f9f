"""Terms of candidates: what the index, the bookings and the engine's rule make of a prompt."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.requests import PromptRequest
from router.protocol.values import SCHEME, Identity, Rank, Scope, Tier
from router.scheduler.candidates import Candidates, Narrowing
from router.scheduler.term_builder import SearchTable, TermBuilder, Wanted
from router.scheduler.terms import (
    CACHED_BLOCKS,
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    Terms,
)
from router.sequence.active.footprint import TrackedParts
from router.sequence.active.prompt import Prompt
from router.sequence.active.tracker import Tracker
from router.sequence.rank_table import BLOCK_SIZE, EAGLE, HELD_BLOCKS, RankTable

FOUR, EIGHT = Identity(SCHEME, 4), Identity(SCHEME, 8)
A, B, C = Rank(1, 0), Rank(2, 0), Rank(3, 0)
REQUEST = PromptRequest(token_ids=list(range(20)))


class World:
    """A table, a tracker, and workers with one rank each."""

    def __init__(self, **identities):
        self.table = RankTable()
        self.tracker = Tracker(1.0, self.table)
        self.tree = RadixTree()
        self.term_builder = TermBuilder(self.table, self.tracker)
        self.prompt = Prompt(REQUEST)
        self.workers = [
            self.worker(*each) for each in zip((A, B, C), identities.values(), strict=False)
        ]

    def worker(self, rank, identity):
        self.table.add(rank)
        row = self.table.row(rank)
        row[BLOCK_SIZE], row[EAGLE], row[HELD_BLOCKS] = identity.block_size, identity.eagle, 50
        return WorkerAnnouncement(
            worker_id=rank.worker_id, name="w", endpoint="http://w", identity=identity,
            total_kv_blocks=9, max_num_batched_tokens=9, incarnation=1,
        )  # fmt: skip

    def candidates(self):
        return Candidates.of(self.workers, self.table)

    def hold(self, rank, identity, *blocks):
        """Let a rank hold these leading blocks of the prompt, in tiers from the fastest on."""
        hashes = self.prompt.hashed(identity).sequence_hashes
        for tier, count in zip(Tier, blocks, strict=False):
            self.tree.store(rank, tier, hashes[:count])

    def weigh(self, candidates=None):
        candidates = self.candidates() if candidates is None else candidates
        search = SearchTable(self.tree.trees, self.table)
        wanted = Wanted(Scope(), 0.0, TrackedParts())
        return self.term_builder.build(search, candidates, self.prompt, wanted)[0]


@pytest.fixture
def world():
    return World(a=FOUR, b=EIGHT)


def test_weighs_each_candidate_under_its_own_identity(world):
    booked = world.prompt.hashed(EIGHT).footprint(0)
    world.tracker.book("x", B, booked, now_s=0.0)
    world.hold(A, FOUR, 5)
    world.hold(B, EIGHT, 1, 2)
    table = world.weigh()
    assert [table.terms(i) for i in range(2)] == [
        Terms(A, 4, 5, 4, 0, 5, 50),
        Terms(B, 8, 1, 2, 20 + 12, 3 + 1, 50),
    ]
    assert table.column(OVERLAP_HOST).tolist() == [5, 2]


def test_terms_of_one_decision_do_not_leak_into_the_next(world):
    world.tracker.book("x", A, world.prompt.hashed(FOUR).footprint(0), now_s=0.0)
    world.hold(A, FOUR, 5)
    assert world.weigh().column(OVERLAP_DEVICE).tolist() == [5, 0]
    world.tracker.free("x", 0.0)
    world.tree.clear(A)
    table = world.weigh()
    assert not table.values[:, OVERLAP_DEVICE : CACHED_BLOCKS + 1].any()
    assert table.column(NEW_BLOCKS).tolist() == [5, 3]


@pytest.mark.parametrize(("overlap", "cached"), [(0, 0), (3, 3), (5, 4)])
def test_the_engine_computes_at_least_one_token(world, overlap, cached):
    world.hold(A, FOUR, overlap)
    assert world.weigh().column(CACHED_BLOCKS)[0] == cached


def test_eagle_costs_a_block():
    eagle = Identity(SCHEME, 4, eagle=True)
    world = World(a=eagle)
    assert world.weigh().column(CACHED_BLOCKS).tolist() == [0]
    world.hold(A, eagle, 4)
    assert world.weigh().column(CACHED_BLOCKS).tolist() == [3]


def test_ranks_without_a_row_are_ignored():
    world = World(a=FOUR, b=FOUR, c=FOUR)
    world.hold(C, FOUR, 2, 0, 5)
    world.hold(A, FOUR, 0, 4)
    world.hold(Rank(99, 0), FOUR, 5)
    table = world.weigh()
    assert table.column(OVERLAP_DEVICE).tolist() == [0, 0, 2]
    assert table.column(OVERLAP_HOST).tolist() == [4, 0, 2]
    assert table.column(OVERLAP_DISK).tolist() == [4, 0, 5]


def test_search_table_fits_until_a_holder_is_added(world):
    search = SearchTable(world.tree.trees, world.table)
    assert search.fits(world.tree.trees)
    assert not search.fits(RadixTree().trees)
    world.hold(A, FOUR, 1)
    assert not search.fits(world.tree.trees)


def test_some_candidates_only(world):
    some = Narrowing(world.candidates()).only(np.array([1]))
    world.hold(B, EIGHT, 2)
    table = world.weigh(some)
    assert (table.ranks, len(table)) == ((B,), 1)
    assert table.terms(0).overlap_blocks == 2
    assert (table.find(B), table.find(A)) == (0, None)


PATHS = st.lists(st.integers(0, 1), max_size=7).map(tuple)


def named(path):
    """A prompt whose caller sends the names of its blocks: of the paths that lead to them."""
    names = [hash(path[: i + 1]) & (2**64 - 1) for i in range(len(path))]
    return Prompt(PromptRequest(sequence_hashes=names, isl_tokens=4 * len(path)))


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), PATHS, st.booleans()), max_size=12), PATHS)
def test_blocks_that_booked_requests_hold_are_not_new(bookings, path):
    world = World(a=FOUR, b=FOUR, c=FOUR)
    for number, (rank, booked, _) in enumerate(bookings):
        world.tracker.book(f"r{number}", rank, named(booked).hashed(FOUR).footprint(0), 0.0)
    for number, (*_, is_freed) in enumerate(bookings):
        if is_freed:
            world.tracker.free(f"r{number}", 0.0)
    world.prompt = named(path)
    for rank, new_blocks in zip((A, B, C), world.weigh().column(NEW_BLOCKS), strict=True):
        held = {p[: i + 1] for r, p, freed in bookings if r == rank and not freed for i in range(7)}
        assert new_blocks == sum(path[: i + 1] not in held for i in range(len(path)))
