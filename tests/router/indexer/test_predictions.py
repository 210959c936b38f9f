"""What bookings say will be cached: beside events, instead of them, or not at all."""

import numpy as np
import pytest

from router.core.commands import (
    Free,
    RemoveWorker,
    SetProblem,
    SetSourceFault,
    Tick,
    Tidy,
    UpsertRegistered,
)
from router.core.effects import RequestCheckpoint
from router.core.registered_workers import complete_worker
from router.indexer.approximate import ApproximateLimits
from router.indexer.base import IndexMode
from router.indexer.errors import IndexDisabledError
from router.indexer.factory import DisabledIndex
from router.indexer.predictions import NO_ESTIMATES, EstimateLimits, Predictions
from router.indexer.rank_index import NO_CACHE, SourceFault
from router.protocol.replies import TrustState
from router.protocol.values import Rank, Scope
from router.protocol.workers import WorkerRegistration
from router.publisher.journal.journal import EventJournal
from router.sequence.hashing.block_hashes import chain
from support.values.builders import World, rank

A, B = Scope("m", "a"), Scope("m", "b")
PATH = chain([1, 2, 3, 4])
PROMPT = list(range(40))


def test_without_limits_nothing_is_estimated():
    predictions = Predictions(NO_ESTIMATES)
    predictions.insert(A, Rank(1, 0), PATH, 0.0)
    assert predictions.added_to({}, A, PATH) == {}
    assert not predictions.expire(1e9)
    assert predictions.entry_counts() == {}


def test_scopes_do_not_meet_and_ranks_go_from_all():
    predictions = Predictions(EstimateLimits(None, ApproximateLimits(10.0, 1024)))
    for worker_id in (1, 2):
        predictions.set_without_events(Rank(worker_id, 0), is_without=True)
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
    predictions = Predictions(EstimateLimits(ApproximateLimits(10.0, 1024)))
    predictions.insert(A, Rank(1, 0), np.arange(5000, dtype=np.uint64), 0.0)
    assert predictions.refused_prompts == 1
    assert predictions.entry_counts() == {A: 0}


@pytest.fixture
def guessing():
    limits = ApproximateLimits(ttl_s=10.0, max_blocks=1024)
    world = World(
        lambda: DisabledIndex(refuses_dumps=False),
        mode=IndexMode.APPROXIMATE,
        estimates=EstimateLimits(None, limits),
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


def test_without_events_trust_is_approximate_and_no_checkpoint_is_requested(guessing):
    trust = guessing.core.trust(rank(1), 0.5)
    assert trust.state is TrustState.APPROXIMATE
    assert "use_kv_events" in trust.reason
    for worker_id in (1, 2, 3):
        guessing.report_load(rank(worker_id), 30.0)
    assert not [
        e for e in guessing.core.handle(Tick(), 30.0)[1] if isinstance(e, RequestCheckpoint)
    ]
    assert not guessing.core.reads_events


def test_without_events_a_hybrid_model_is_unknown_and_estimates_are_of_full_attention(guessing):
    """Its engine resumes a prompt after the whole of an earlier one, and not in the middle."""
    chosen = guessing.book("x", PROMPT)[0].rank
    shorter, longer = PROMPT[:36], [*PROMPT, *PROMPT]
    for prompt, blocks in ((longer, 10), (shorter, 9)):
        found = guessing.select(prompt, allowed_worker_ids=[chosen.worker_id])
        assert found.choice.chosen.overlap_blocks == blocks
    assert guessing.core.trust(chosen, 0.0).state is TrustState.APPROXIMATE
    assert guessing.core.index.layout(chosen) is None


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
    world = World(estimates=EstimateLimits(ApproximateLimits(ttl_s=2.0, max_blocks=1024)))
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


FAULT = SourceFault("its event socket never answered", "estimate")


@pytest.fixture
def mixed():
    """Worker 1 has events; 2 has none by choice; 3 has sockets that do not answer yet."""
    world = World()
    world.worker(1)
    for worker_id, endpoint in ((2, None), (3, "tcp://e:3")):
        registration = WorkerRegistration(
            worker_id=worker_id, endpoint="http://w", block_size=4, kv_events_endpoint=endpoint
        )
        world.core.handle(UpsertRegistered(complete_worker(registration, 1)), 0.0)
    return world


def trusts(world, now_s=0.5):
    return [world.core.trust(rank(worker_id), now_s).state for worker_id in (1, 2, 3)]


def overlap(world, worker_id):
    placement = world.select(PROMPT, allowed_worker_ids=[worker_id])
    return placement.choice.chosen.overlap_blocks


def test_each_rank_is_known_by_events_or_by_bookings(mixed):
    assert trusts(mixed) == ["exact", "approximate", "blind"]
    for worker_id in (1, 2, 3):
        mixed.book(f"x{worker_id}", PROMPT, allowed_worker_ids=[worker_id])
    assert [overlap(mixed, worker_id) for worker_id in (1, 2, 3)] == [0, 10, 0]
    mixed.cache(rank(1), PROMPT[:16])
    assert {r: o.device for r, o in mixed.select(PROMPT).overlaps.items()} == {
        rank(1): 4, rank(2): 10,
    }  # fmt: skip


def test_rank_whose_sockets_never_answered_is_estimated_until_they_do(mixed):
    mixed.core.handle(SetSourceFault(rank(3), FAULT), 0.0)
    assert trusts(mixed) == ["exact", "approximate", "approximate"]
    assert mixed.core.trust(rank(3), 0.5).reason == FAULT.text
    mixed.book("x", PROMPT, allowed_worker_ids=[3])
    assert overlap(mixed, 3) == 10
    announced = mixed.core.fleet.get(3).announcement
    mixed.journals[rank(3)] = EventJournal(rank(3), 1, announced.identity)
    mixed.deliver(rank(3))
    assert trusts(mixed)[2] in ("exact", "lagging")
    assert overlap(mixed, 3) == 0


def test_fault_that_ends_before_the_first_event_ends_the_estimates(mixed):
    mixed.core.handle(SetSourceFault(rank(3), FAULT), 0.0)
    mixed.book("x", PROMPT, allowed_worker_ids=[3])
    mixed.core.handle(SetSourceFault(rank(3), None), 0.0)
    assert (trusts(mixed)[2], overlap(mixed, 3)) == ("blind", 0)


def test_engine_that_caches_nothing_is_credited_with_nothing(mixed):
    registration = WorkerRegistration(
        worker_id=4, endpoint="http://w", block_size=4, caches_prefixes=False
    )
    mixed.core.handle(UpsertRegistered(complete_worker(registration, 1)), 0.0)
    mixed.book("x", PROMPT, allowed_worker_ids=[4])
    assert overlap(mixed, 4) == 0
    trust = mixed.core.trust(rank(4), 0.5)
    assert (trust.state, trust.reason) == (TrustState.APPROXIMATE, NO_CACHE)


def test_no_checkpoint_is_requested_of_ranks_without_events(mixed):
    wanted = [e for e in mixed.core.handle(Tick(), 30.0)[1] if isinstance(e, RequestCheckpoint)]
    assert [each.rank for each in wanted] == [rank(3)]


def test_fault_of_messages_that_arrive_degrades_an_exact_rank(mixed):
    fault = SourceFault("its messages are not KV events", "degrade")
    mixed.core.handle(SetSourceFault(rank(1), fault), 0.0)
    trust = mixed.core.trust(rank(1), 0.5)
    assert (trust.state, trust.reason) == (TrustState.DEGRADED, fault.text)
    assert rank(1) in mixed.select(PROMPT).choice.table.ranks
    mixed.core.handle(SetSourceFault(rank(2), fault), 0.0)
    assert trusts(mixed)[:2] == ["degraded", "degraded"]
    mixed.core.handle(SetSourceFault(rank(1), SourceFault("x")), 0.0)
    assert trusts(mixed)[0] == "exact"


def test_unreachable_worker_says_so_and_is_not_chosen(mixed):
    mixed.core.handle(SetProblem(3, "unreachable: x", is_unreachable=True), 0.0)
    trust = mixed.core.trust(rank(3), 0.5)
    assert (trust.state, trust.reason) == (TrustState.UNREACHABLE, "unreachable: x")
    assert rank(3) not in mixed.select(PROMPT).choice.table.ranks
    mixed.core.handle(SetProblem(3, None), 0.0)
    assert trusts(mixed)[2] == "blind"


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


def test_beside_events_nothing_is_estimated_of_ranks_that_keep_parts_of_prompts():
    limits = EstimateLimits(ApproximateLimits(10.0, 1024), ApproximateLimits(10.0, 1024))
    predictions = Predictions(limits, lambda rank: rank.worker_id != 1)
    predictions.insert(A, Rank(1, 0), PATH, 0.0)
    assert not predictions.added_to({}, A, PATH)
    predictions.set_without_events(Rank(1, 0), is_without=True)
    predictions.insert(A, Rank(1, 0), PATH, 0.0)
    assert predictions.added_to({}, A, PATH)
