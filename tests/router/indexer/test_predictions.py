"""What bookings say will be cached: beside events, instead of them, or not at all."""

import numpy as np
import pytest

from router.core.commands import Free, RemoveWorker, Tick, Tidy
from router.core.effects import RequestCheckpoint
from router.indexer.approximate import ApproximateLimits
from router.indexer.base import IndexMode
from router.indexer.errors import IndexDisabledError
from router.indexer.factory import DisabledIndex
from router.indexer.predictions import Predictions
from router.protocol.replies import TrustState
from router.protocol.values import Rank, Scope
from router.sequence.hashing.block_hashes import chain
from support.values.builders import World, rank

A, B = Scope("m", "a"), Scope("m", "b")
PATH = chain([1, 2, 3, 4])
PROMPT = list(range(40))


def test_without_limits_nothing_is_estimated():
    predictions = Predictions(None)
    predictions.insert(A, Rank(1, 0), PATH, 0.0)
    assert predictions.added_to({}, A, PATH) == {}
    assert not predictions.expire(1e9)
    assert predictions.entry_counts() == {}


def test_scopes_do_not_meet_and_ranks_go_from_all():
    predictions = Predictions(ApproximateLimits(10.0, 1024))
    predictions.insert(A, Rank(1, 0), PATH, 0.0)
    predictions.insert(B, Rank(2, 0), PATH[:2], 0.0)
    assert {r: o.device for r, o in predictions.added_to({}, A, PATH).items()} == {Rank(1, 0): 4}
    assert {r: o.device for r, o in predictions.added_to({}, B, PATH).items()} == {Rank(2, 0): 2}
    held = [(scope, *part.rank_of.values()) for scope, part in predictions.dump_slices()]
    assert set(held) == {(A, Rank(1, 0)), (B, Rank(2, 0))}
    predictions.drop_rank(Rank(1, 0))
    assert predictions.entry_counts() == {A: 0, B: 2}
    while predictions.expire(10.0):
        pass
    assert predictions.entry_counts() == {A: 0, B: 0}
    assert predictions.freed_blocks() == (2, 0)


def test_a_prompt_that_finds_no_room_is_counted():
    predictions = Predictions(ApproximateLimits(10.0, 1024))
    predictions.insert(A, Rank(1, 0), np.arange(5000, dtype=np.uint64), 0.0)
    assert predictions.refused_prompts == 1
    assert predictions.entry_counts() == {A: 0}


@pytest.fixture
def guessing():
    limits = ApproximateLimits(ttl_s=10.0, max_blocks=1024)
    world = World(
        lambda: DisabledIndex(refuses_dumps=False), mode=IndexMode.APPROXIMATE, prediction=limits
    )
    for worker_id in (1, 2, 3):
        world.worker(worker_id)
    return world


def test_without_events_bookings_teach_where_a_prompt_is_cached(guessing):
    placement, _ = guessing.book("x", PROMPT)
    guessing.core.handle(Free("x"), 0.0)
    again = guessing.select(PROMPT)
    assert again.rank == placement.rank
    assert again.choice.chosen.overlap_blocks == 10
    while guessing.core.handle(Tidy(), 10.0)[0]:
        pass
    assert guessing.select(PROMPT).choice.chosen.overlap_blocks == 0


def test_without_events_trust_is_degraded_and_no_checkpoint_is_requested(guessing):
    trust = guessing.core.trust(rank(1), 0.5)
    assert trust.state is TrustState.DEGRADED
    assert "use_kv_events" in trust.reason
    for worker_id in (1, 2, 3):
        guessing.report_load(rank(worker_id), 30.0)
    assert not [
        e for e in guessing.core.handle(Tick(), 30.0)[1] if isinstance(e, RequestCheckpoint)
    ]
    assert not guessing.core.reads_events


def test_without_events_dumps_are_estimates(guessing):
    placement, _ = guessing.book("x", PROMPT)
    [(scope, blocks)] = guessing.core.dump()
    assert (scope, blocks.rank, len(blocks.sequence_hashes)) == (Scope(), placement.rank, 10)


def test_removed_rank_drops_its_estimates(guessing):
    placement, _ = guessing.book("x", PROMPT)
    guessing.core.handle(RemoveWorker(placement.rank.worker_id, "withdrawn"), 0.0)
    assert list(guessing.core.dump()) == []
    assert guessing.select(PROMPT).choice.chosen.overlap_blocks == 0


def test_beside_events_the_larger_of_both_counts():
    world = World(prediction=ApproximateLimits(ttl_s=2.0, max_blocks=1024))
    world.worker(1)
    world.worker(2)
    world.cache(rank(1), PROMPT[:16])
    world.book("x", PROMPT, allowed_worker_ids=[2])
    overlaps = world.select(PROMPT).overlaps
    assert {r: o.device for r, o in overlaps.items()} == {rank(1): 4, rank(2): 10}
    while world.core.handle(Tidy(), 2.0)[0]:
        pass
    overlaps = world.select(PROMPT).overlaps
    assert {r: o.device for r, o in overlaps.items()} == {rank(1): 4}
    assert [blocks.rank for _, blocks in world.core.dump()] == [rank(1)]


def test_select_alone_teaches_nothing(guessing):
    guessing.select(PROMPT)
    assert guessing.select(PROMPT).choice.chosen.overlap_blocks == 0


def test_no_index_matches_nothing_and_says_why():
    world = World(DisabledIndex, mode=IndexMode.NONE)
    world.worker(1)
    world.cache(rank(1), PROMPT)
    assert world.select(PROMPT).choice.chosen.overlap_blocks == 0
    trust = world.core.trust(rank(1), 0.5)
    assert (trust.state, trust.reason) == (
        TrustState.BLIND,
        "no index: overlap_score_weight is 0",
    )
    with pytest.raises(IndexDisabledError):
        list(world.core.dump())
