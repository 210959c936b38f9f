"""Commands in, answers and effects out."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.commands import (
    Apply,
    ApplyLoad,
    Free,
    OrderWorker,
    OutputBlock,
    PrefillComplete,
    RemoveWorker,
    Reserve,
    SetConnected,
    StreamLost,
    Tick,
    Tidy,
    UpsertWorker,
)
from router.core.effects import FetchWorker, RequestCheckpoint, ReservationExpired, WorkerGone
from router.core.errors import MissingRequestIdError, TooManyReservationsError
from router.errors import InvalidFieldError, WorkerNotFoundError
from router.indexer.event_log import LogVerdict
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.events import (
    Checkpoint,
    ClassBlocks,
    ClassCleared,
    ClassRemoved,
    ClassStored,
    Cleared,
    EventBatch,
    Removed,
    Stored,
    TierBlocks,
    decode_log_message,
    encode_log_message,
    pack_batch,
)
from router.protocol.hybrid import MAX_CLASSES, HybridState, LayerClass, Layout
from router.protocol.replies import TrustState
from router.protocol.requests import ConfigOverride, ReserveRequest, SelectRequest
from router.protocol.values import (
    SCHEME,
    HeldState,
    Identity,
    Scope,
    Tier,
    pack_hashes,
)
from router.scheduler.errors import NoEndpointsError
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError
from router.sequence.active.prompt import MAX_PROMPT_TOKENS, prepare
from support.values.builders import BLOCK_SIZE, IDENTITY, World, announcement, rank, report

PROMPT = list(range(40))


@pytest.fixture
def world():
    world = World()
    for worker_id in (1, 2, 3):
        world.worker(worker_id)
    return world


# ── Placing ──────────────────────────────────────────────────────────────────────────────────────


def test_sends_a_prompt_where_its_prefix_is(world):
    world.cache(rank(2), PROMPT[:20])
    placement = world.select(PROMPT)
    assert placement.rank == rank(2)
    assert placement.choice.chosen.overlap_blocks == 5
    assert placement.choice.chosen.potential_prefill_tokens == 20


def test_load_can_outweigh_a_prefix(world):
    world.cache(rank(2), PROMPT[:8])
    for number in range(3):
        world.book(f"r{number}", PROMPT, allowed_worker_ids=[2])
    assert world.select(PROMPT).rank != rank(2)


def test_every_rank_is_a_candidate(world):
    world.worker(4, data_parallel_start_rank=2, data_parallel_size=2)
    world.cache(rank(4, 3), PROMPT)
    placement = world.select(PROMPT)
    assert placement.rank == rank(4, 3)
    assert len(placement.choice.table) == 5


def test_equal_costs_go_to_the_smallest_cache(world):
    for worker_id in (1, 3):
        world.cache(rank(worker_id), list(range(100, 140)))
    assert {world.select(PROMPT).rank for _ in range(20)} == {rank(2)}


@pytest.mark.parametrize("part", ["predictor", "ranks", "fleet", "handle", "new"])
def test_parts_of_a_core_cannot_be_replaced(world, part):
    with pytest.raises(AttributeError, match="cannot be replaced"):
        setattr(world.core, part, getattr(world.core, part, None))


def test_weight_and_temperature_can_be_overridden(world):
    world.cache(rank(2), PROMPT)
    world.book("x", PROMPT, allowed_worker_ids=[2])
    blind = ConfigOverride(overlap_score_weight=0.0)
    assert all(world.select(PROMPT, router_config_override=blind).rank != rank(2)
               for _ in range(20))  # fmt: skip
    warm = ConfigOverride(router_temperature=100.0)
    assert len({world.select(PROMPT, router_config_override=warm).rank for _ in range(60)}) == 3


def test_only_allowed_workers_are_candidates(world):
    world.cache(rank(2), PROMPT)
    assert world.select(PROMPT, allowed_worker_ids=[3]).rank == rank(3)


@pytest.mark.parametrize("fields", [{"model_name": "zz"}, {"routing_group": "zz"}])
def test_an_unknown_scope_has_no_endpoints(world, fields):
    with pytest.raises(NoEndpointsError, match="no schedulable workers"):
        world.select(PROMPT, **fields)


@pytest.mark.parametrize("allowed", [[], [99]])
def test_no_allowed_worker_is_named_in_no_endpoints(world, allowed):
    with pytest.raises(NoEndpointsError, match="allowed_worker_ids"):
        world.select(PROMPT, allowed_worker_ids=allowed)


def test_selecting_books_nothing(world):
    world.select(PROMPT)
    assert len(world.core.tracker) == 0


def test_tokens_must_be_there():
    with pytest.raises(InvalidFieldError) as caught:
        prepare(SelectRequest(), ())
    assert caught.value.field == "token_ids"


def test_prompts_have_a_limit():
    with pytest.raises(InvalidFieldError) as caught:
        prepare(SelectRequest(token_ids=[0] * (MAX_PROMPT_TOKENS + 1)), ())
    assert (caught.value.field, caught.value.http_status) == ("token_ids", 413)


def test_an_empty_prompt_can_be_placed(world):
    assert world.select([]).choice.chosen.potential_prefill_tokens == 0


def test_block_sizes_may_differ_within_a_scope(world):
    world.worker(4, identity=Identity(SCHEME, 8))
    world.cache(rank(4), PROMPT)
    placement = world.select(PROMPT)
    assert (placement.rank, placement.choice.chosen.overlap_blocks) == (rank(4), 5)
    assert set(world.core.identities(Scope())) == {Identity(SCHEME, 4), Identity(SCHEME, 8)}


def test_salt_keeps_tenants_apart(world):
    world.cache(rank(2), PROMPT, cache_salt="a")
    assert world.select(PROMPT, cache_salt="a").choice.chosen.overlap_blocks == 10
    for other in ({}, {"cache_salt": "b"}, {"lora_name": "a"}):
        assert world.select(PROMPT, **other).choice.chosen.overlap_blocks == 0


# ── Reservations ─────────────────────────────────────────────────────────────────────────────────


def test_the_life_of_a_reservation(world):
    world.cache(rank(2), PROMPT[:20])
    placement, effects = world.book("x", PROMPT)
    assert effects == []

    def load():
        active = world.core.tracker.active(placement.rank)
        return active.active_prefill_tokens, active.active_blocks

    assert load() == (20, 10)
    world.core.handle(PrefillComplete("x"), 1.0)
    assert load() == (0, 10)
    world.core.handle(OutputBlock("x", None), 1.0)
    assert load() == (0, 11)
    world.core.handle(Free("x"), 1.0)
    assert len(world.core.tracker) == 0


def test_a_booking_needs_an_id(world):
    with pytest.raises(MissingRequestIdError):
        world.book(None, PROMPT)


def test_blocks_decay_as_the_expected_output_comes(world):
    """Asked for at the selection, or at a booking that its caller chose."""
    world.book("x", PROMPT, expected_output_tokens=16)
    request = ReserveRequest(
        token_ids=PROMPT[::-1], worker_id=1, request_id="y", expected_output_tokens=16
    )
    world.core.handle(Reserve(request, prepare(request, ())), 0.0)
    for request_id in ("x", "y"):
        for _ in range(2):
            world.core.handle(OutputBlock(request_id, None), 1.0)
        assert world.core.tracker.shared(request_id).progress.decay_fraction == 0.5


def test_an_id_is_booked_once(world):
    world.book("x", PROMPT)
    with pytest.raises(DuplicateReservationError):
        world.book("x", PROMPT)
    assert len(world.core.tracker) == 1


def test_reservations_are_limited():
    world = World(max_reservations=2)
    world.worker(1)
    world.book("a", PROMPT)
    world.book("b", PROMPT)
    with pytest.raises(TooManyReservationsError):
        world.book("c", PROMPT)
    world.core.handle(Free("a"), 0.0)
    world.book("c", PROMPT)


def test_unknown_ids_are_not_found(world):
    for command in (
        lambda: world.core.handle(Free("x"), 0.0)[1],
        lambda: world.core.handle(PrefillComplete("x"), 0.0)[1],
        lambda: world.core.handle(OutputBlock("x", None), 0.0)[1],
    ):
        with pytest.raises(ReservationNotFoundError):
            command()


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_decay_fraction_is_a_fraction(world, fraction):
    world.book("x", PROMPT)
    with pytest.raises(InvalidFieldError):
        world.core.handle(OutputBlock("x", fraction), 0.0)


def reserve(world, **fields):
    request = ReserveRequest(token_ids=PROMPT, **fields)
    return world.core.handle(Reserve(request, prepare(request, ())), 0.0)


def test_a_caller_may_choose_the_rank(world):
    world.cache(rank(3), PROMPT[:20])
    worker, _ = reserve(world, worker_id=3, request_id="x")
    assert worker.endpoint == "http://w3"
    assert world.core.tracker.active(rank(3)).active_prefill_tokens == 20


@pytest.mark.parametrize(
    "fields",
    [{"worker_id": 77}, {"worker_id": 1, "dp_rank": 1}, {"worker_id": 1, "model_name": "m"}],
)
def test_a_chosen_rank_must_exist_in_the_scope(world, fields):
    with pytest.raises(WorkerNotFoundError):
        reserve(world, request_id="x", **fields)
    assert len(world.core.tracker) == 0


def test_a_chosen_rank_must_be_schedulable(world):
    world.core.handle(OrderWorker(1, "draining"), 0.0)
    with pytest.raises(WorkerNotFoundError):
        reserve(world, worker_id=1, request_id="x")


def test_reservations_expire_without_progress():
    world = World(reservation_ttl_s=10.0)
    world.worker(1)
    world.book("x", PROMPT, now_s=0.0)
    world.core.handle(PrefillComplete("x"), 5.0)
    world.report_load(rank(1), 14.0)
    assert world.core.handle(Tick(), 14.0)[1] == []
    world.report_load(rank(1), 15.0)
    assert world.core.handle(Tick(), 15.0)[1] == [ReservationExpired("x", rank(1))]


# ── Workers ──────────────────────────────────────────────────────────────────────────────────────


def test_silent_worker_is_removed_with_its_blocks_and_bookings(world):
    world.cache(rank(1), PROMPT)
    world.book("x", PROMPT)
    for worker_id in (2, 3):
        world.report_load(rank(worker_id), 2.0)
    assert world.core.handle(Tick(), 2.6)[1] == [WorkerGone(1, "silent", 1)]
    while world.core.handle(Tidy(), 2.6)[0]:
        pass
    assert world.core.index.stats()[Scope()].blocks == 0
    assert len(world.core.tracker) == 0
    assert world.select(PROMPT).rank != rank(1)


def test_a_withdrawn_worker_goes_at_once(world):
    assert world.core.handle(RemoveWorker(1, "withdrawn"), 0.0)[1] == [
        WorkerGone(1, "withdrawn", 0)
    ]
    assert world.core.handle(RemoveWorker(1, "withdrawn"), 0.0)[1] == []


def test_report_of_an_unannounced_worker_fetches_it(world):
    assert world.core.handle(ApplyLoad(report(8)), 0.0)[1] == [FetchWorker(8)]


def test_a_worker_that_comes_back_is_blind_until_its_checkpoint(world):
    world.cache(rank(1), PROMPT)
    world.core.handle(RemoveWorker(1, "silent"), 0.0)
    world.core.handle(UpsertWorker(announcement(1)), 10.0)
    world.report_load(rank(1), 10.0)
    assert world.core.trust(rank(1), 10.0).state is TrustState.BLIND
    for worker_id in (2, 3):
        world.report_load(rank(worker_id), 11.0)
    world.report_load(rank(1), 11.0)
    assert world.core.handle(Tick(), 11.0)[1] == [
        RequestCheckpoint(rank(1), "no checkpoint read yet")
    ]
    world.journals[rank(1)].require_checkpoint()
    world.deliver(rank(1), 11.1)
    world.report_load(rank(1), 11.1)
    assert world.core.trust(rank(1), 11.1).state is TrustState.EXACT
    assert world.select(PROMPT).choice.chosen.overlap_blocks == 10


def test_a_cordoned_worker_is_not_chosen_but_goes_on(world):
    world.cache(rank(1), PROMPT)
    world.book("x", PROMPT)
    world.core.handle(OrderWorker(1, "cordoned"), 0.0)
    assert world.select(PROMPT).rank != rank(1)
    assert world.core.tracker.active(rank(1)).active_requests == 1
    world.core.handle(OrderWorker(1, None), 0.0)
    assert world.select(PROMPT).rank == rank(1)


def test_a_new_life_forgets_index_and_reservations(world):
    world.cache(rank(1), PROMPT)
    world.book("x", PROMPT)
    world.worker(1, now_s=5.0, incarnation=2)
    assert world.core.index.held_blocks(rank(1)) == 0
    assert len(world.core.tracker) == 0


def test_a_checkpoint_may_come_before_its_announcement(world):
    world.cache(rank(1), PROMPT)
    world.book("x", PROMPT)
    journal = type(world.journals[rank(1)])(rank(1), 2, Identity(SCHEME, BLOCK_SIZE))
    journal.stored(Tier.DEVICE, [1, 2, 3], None)
    world.journals[rank(1)] = journal
    assert world.deliver(rank(1)) == [LogVerdict.NEW_LIFE]
    assert len(world.core.tracker) == 0
    world.core.handle(UpsertWorker(announcement(1, incarnation=2)), 5.0)
    assert world.core.index.held_blocks(rank(1)) == 3


def test_the_first_checkpoint_after_our_start_frees_nothing():
    world = World()
    world.core.handle(UpsertWorker(announcement(1)), 0.0)
    world.core.handle(ApplyLoad(report(1)), 0.0)
    world.book("x", PROMPT)
    world.worker(1)
    assert len(world.core.tracker) == 1


def test_renewing_an_announcement_changes_nothing(world):
    world.cache(rank(1), PROMPT)
    world.book("x", PROMPT)
    world.core.handle(UpsertWorker(announcement(1)), 5.0)
    assert world.core.index.held_blocks(rank(1)) == 10
    assert len(world.core.tracker) == 1


def test_changes_of_an_announcement_apply_live(world):
    world.cache(rank(1), PROMPT)
    world.core.handle(
        UpsertWorker(announcement(1, endpoint="http://new", data_parallel_size=2)), 1.0
    )
    placement = world.select(PROMPT)
    assert (placement.rank, placement.worker.endpoint) == (rank(1), "http://new")
    assert len(placement.choice.table) == 4
    world.core.handle(UpsertWorker(announcement(1, endpoint="http://new")), 2.0)
    assert len(world.select(PROMPT).choice.table) == 3


@pytest.mark.parametrize("fields", [{"routing_group": "other"}, {"identity": Identity(SCHEME, 8)}])
def test_changed_routing_group_or_identity_empties_a_rank(world, fields):
    world.cache(rank(1), PROMPT)
    world.core.handle(UpsertWorker(announcement(1, **fields)), 1.0)
    assert world.core.index.held_blocks(rank(1)) == 0


def test_events_of_an_unannounced_rank_return_none(world):
    world.core.handle(RemoveWorker(1, "withdrawn"), 0.0)
    world.journals[rank(1)].stored(Tier.DEVICE, [1], None)
    assert world.deliver(rank(1)) == [None]


# ── Trust ────────────────────────────────────────────────────────────────────────────────────────


def test_a_silent_agent_beside_its_engine_is_blind_and_still_chosen(world):
    world.worker(4, agent_is_engine=False)
    world.cache(rank(4), PROMPT)
    for worker_id in (1, 2, 3):
        world.report_load(rank(worker_id), 9.0)
    assert world.core.handle(Tick(), 9.0)[1] == []
    trust = world.core.trust(rank(4), 9.0)
    assert (trust.state, trust.reason) == (TrustState.BLIND, "agent silent for 9.0 s")
    assert world.select(PROMPT).rank == rank(4)


def test_without_the_bus_nothing_is_exact(world):
    world.core.handle(SetConnected(False), 1.0)
    trust = world.core.trust(rank(1), 1.0)
    assert (trust.state, trust.reason) == (TrustState.LAGGING, "event bus disconnected")
    assert world.select(PROMPT).rank in {rank(1), rank(2), rank(3)}


def test_lost_stream_requests_a_checkpoint_of_every_rank(world):
    world.core.handle(StreamLost(), 0.5)
    for worker_id in (1, 2, 3):
        world.report_load(rank(worker_id), 1.5)
    asked = world.core.handle(Tick(), 1.6)[1]
    assert asked == [RequestCheckpoint(rank(i), "event stream lost") for i in (1, 2, 3)]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), max_size=20), st.integers(0, 40))
def test_the_chosen_rank_is_never_dearer_than_another(cached, length):
    world = World()
    for worker_id in (1, 2, 3):
        world.worker(worker_id)
    for number, (worker_id, tokens) in enumerate(cached):
        world.cache(rank(worker_id), PROMPT[:tokens])
        world.book(f"r{number}", PROMPT[:tokens])
    choice = world.select(PROMPT[:length]).choice
    assert choice.costs[choice.index] == min(choice.costs)
    world.core.tracker.check_invariants()


def test_decisions_repeat_with_the_same_seed():
    def run():
        world = World()
        for worker_id in (1, 2, 3):
            world.worker(worker_id)
        return [str(world.book(f"r{i}", PROMPT[: i % 40])[0].rank) for i in range(50)]

    assert run() == run()


def test_prepare_hashes_under_every_identity():
    request = SelectRequest(token_ids=PROMPT)
    identities = [Identity(SCHEME, 4), Identity(SCHEME, 8)]
    prompt = prepare(request, identities)
    sizes = [len(prompt.hashed(identity).sequence_hashes) for identity in identities]
    assert sizes == [10, 5]
    assert prompt.hashed(identities[0]).sequence_hashes.dtype == np.uint64


def test_effects_are_values(world):
    _, effects = world.book("x", PROMPT)
    assert msgspec.msgpack.encode(effects)


hash_lists = st.lists(st.integers(0, 5) | st.just(2**64 - 1), max_size=6).map(
    lambda hashes: pack_hashes(np.array(hashes, dtype=np.uint64))
)
tiers = st.sampled_from(Tier)
per_tier = st.tuples(*[st.integers(0, 2**63 - 1)] * 4)
digests = st.tuples(*[st.integers(0, 2**64 - 1)] * 4)
states = st.builds(HeldState, per_tier, per_tier, digests)
lives = st.integers(0, 2)
events = st.one_of(
    st.builds(Stored, tiers, hash_lists),
    st.builds(Removed, tiers, hash_lists),
    st.builds(Cleared, st.none() | tiers),
)
block_tokens = st.sampled_from([1, 3, 4, 16])
classes = st.one_of(
    st.builds(
        LayerClass, st.sampled_from(["window", "chunk"]), block_tokens, st.integers(1, 40),
        st.booleans(),
    ),
    st.builds(LayerClass, st.sampled_from(["state", "tail"]), block_tokens, st.just(0)),
)  # fmt: skip
layouts = st.builds(
    Layout, block_tokens, st.just(0) | block_tokens,
    st.lists(classes, max_size=MAX_CLASSES).map(tuple), st.booleans(),
)  # fmt: skip
hybrids = layouts.flatmap(
    lambda layout: st.builds(
        HybridState,
        st.just(layout),
        *[st.tuples(*[st.integers(0, 2**63 - 1)] * len(layout.classes))] * 2,
    )
)
identities = st.sampled_from([IDENTITY, Identity(SCHEME, 8), Identity("other", 4)])


def class_events(hybrid):
    """Events of a rank's tiers and of the classes that it has."""
    if hybrid is None or not hybrid.layout.classes:
        return events
    indexes = st.integers(0, len(hybrid.layout.classes) - 1)
    return st.one_of(
        events,
        st.builds(ClassStored, indexes, hash_lists),
        st.builds(ClassRemoved, indexes, hash_lists),
        st.builds(ClassCleared, indexes),
    )


hybrid_events = (st.none() | hybrids).flatmap(
    lambda hybrid: st.tuples(
        st.lists(class_events(hybrid), min_size=1, max_size=4), st.just(hybrid)
    )
)
batches = st.builds(
    lambda events, state, first, *head: EventBatch(
        *head, first, first + len(events[0]) - 1, pack_batch(state, events[0]), events[1]
    ),
    hybrid_events, states, st.integers(1, 9),
    st.integers(1, 3), st.integers(0, 2), lives, identities,
)  # fmt: skip
parts = st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)])
checkpoints = st.builds(
    lambda part, *fields: Checkpoint(*fields[:5], *part, *fields[5:]),
    parts, st.integers(1, 3), st.integers(0, 2), lives, identities, st.integers(0, 9),
    st.lists(st.builds(TierBlocks, tiers, hash_lists), max_size=3).map(tuple), states,
    st.none() | hybrids,
    st.lists(st.builds(ClassBlocks, st.integers(0, MAX_CLASSES - 1), hash_lists), max_size=3).map(
        tuple
    ),
)  # fmt: skip


@given(st.lists(batches | checkpoints, max_size=25))
def test_no_sequence_of_well_formed_messages_breaks_it(messages):
    """Whatever a broken or hostile agent says, the index stays sound and nothing is raised."""
    indexers = []
    world = World(lambda: indexers.append(RadixTree()) or indexers[-1])
    for worker_id in (1, 2):
        world.worker(worker_id)
    for message in messages:
        world.core.handle(Apply(decode_log_message(encode_log_message(message))), 1.0)
        for indexer in indexers:
            indexer.check_invariants()
    world.core.handle(Tick(), 2.0)
    world.select(PROMPT)
