"""Several routers' cores: bookings of one weigh at the others, and progress counts anywhere."""

from functools import partial

import pytest

from router.core.commands import (
    ApplyPeer,
    Free,
    OutputBlock,
    PrefillComplete,
    RemoveWorker,
    Reserve,
    Tick,
    UpsertWorker,
)
from router.core.effects import ReplicaGone, TellReplica, UsageTold
from router.protocol.replicas import HandedOver, Progress, PromptUsage, SnapshotWanted
from router.protocol.requests import ReserveRequest
from router.protocol.values import Scope
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError
from router.sequence.active.prompt import prepare
from router.sequence.replicas.replica_set import SILENCE_S
from support.fleets.peers import Other, Sharing
from support.values.builders import World, announcement, rank

PROMPT = list(range(42))


@pytest.fixture
def sharing():
    return Sharing(1, 2, 3)


def book(sharing, router_id, request_id, worker_id=1, tokens=PROMPT):
    request = ReserveRequest(token_ids=tokens, request_id=request_id, worker_id=worker_id)
    prompt = prepare(request, ())
    return sharing.core(router_id).handle(Reserve(request, prompt), sharing.now_s)[1]


def agree(sharing):
    first, *others = sharing.loads()
    assert all(each == first for each in others)
    return first


def is_idle(load):
    return not any(number for columns in load.values() for each in columns for number in each)


def test_booking_of_one_router_is_load_at_all(sharing):
    book(sharing, 1, "a")
    book(sharing, 2, "b", tokens=[*PROMPT[:20], 99])
    sharing.exchange()
    load = agree(sharing)
    assert load[rank(1)][0][0] == 42 + 21
    assert load[rank(1)][1][0] == 10 + 1 + 1  # five blocks are shared
    assert is_idle({rank(2): load[rank(2)]})
    assert [len(world.core.tracker) for world in sharing.worlds] == [1, 1, 0]


def test_all_follow_a_request_to_its_end(sharing):
    book(sharing, 1, "a")
    sharing.exchange()
    core = sharing.core(1)
    core.handle(PrefillComplete("a"), 0.0)
    core.handle(OutputBlock("a", None), 0.0)
    core.handle(OutputBlock("a", 0.5), 0.0)
    sharing.now_s = 1.0
    sharing.exchange()
    load = agree(sharing)
    assert load[rank(1)][0] == [0, 0]
    assert load[rank(1)][1] == [6.0 + 1, 1, 1, 42 + 8]
    core.handle(Free("a"), 1.0)
    sharing.exchange()
    assert is_idle(agree(sharing))


def test_the_next_choice_of_another_router_sees_it(sharing):
    """Two equal ranks: one is taken, so the other router takes the other."""
    placement, _ = sharing.worlds[0].book("a", PROMPT)
    sharing.exchange()
    assert sharing.worlds[1].select(list(range(100, 142))).rank != placement.rank


@pytest.mark.parametrize("told", [PrefillComplete, partial(OutputBlock, decay_fraction=None), Free])
def test_progress_may_be_reported_to_any_router(sharing, told):
    book(sharing, 1, "a")
    sharing.exchange()
    report = told(request_id="a")
    _, effects = sharing.core(3).handle(report, 0.0)
    sharing.now_s = 1.0
    sharing.exchange(effects)
    load = agree(sharing)
    assert is_idle(load) == isinstance(report, Free)
    assert (load[rank(1)][0][0] == 0) == (not isinstance(report, OutputBlock))
    assert load[rank(1)][1][0] == {PrefillComplete: 11, OutputBlock: 12, Free: 0}[type(report)]


@pytest.mark.parametrize("told", [PrefillComplete, Free])
def test_usage_reaches_the_predicting_router_and_counts_once(sharing, told):
    book(sharing, 1, "a")
    sharing.exchange()
    usage = PromptUsage(42, 40)
    (passed_on,) = sharing.core(3).handle(told("a", usage), 0.0)[1]
    assert passed_on.router_id == 1
    assert sharing.core(1).handle(ApplyPeer(passed_on.message), 0.0)[1] == [UsageTold(usage, 0)]
    assert sharing.core(1).handle(ApplyPeer(passed_on.message), 0.0)[1] == []


def test_progress_of_an_unknown_request_is_not_found(sharing):
    for told in (PrefillComplete, Free):
        with pytest.raises(ReservationNotFoundError):
            sharing.core(3).handle(told("a"), 0.0)


def test_a_request_booked_anew_elsewhere_counts_once(sharing):
    """A caller without an answer from one router asks the next one."""
    book(sharing, 3, "a", worker_id=1)
    sharing.exchange()
    with pytest.raises(DuplicateReservationError):
        book(sharing, 3, "a", worker_id=2)
    sharing.exchange(book(sharing, 1, "a", worker_id=2))
    sharing.exchange()
    load = agree(sharing)
    assert is_idle({rank(1): load[rank(1)]})
    assert load[rank(2)][1][1] == 1
    assert [len(world.core.tracker) for world in sharing.worlds] == [1, 0, 0]


def test_booked_at_two_routers_at_once_one_yields(sharing):
    book(sharing, 1, "a", worker_id=1)
    book(sharing, 2, "a", worker_id=2)
    sharing.exchange()
    assert agree(sharing)[rank(2)][1][1] == 1
    assert [len(world.core.tracker) for world in sharing.worlds] == [0, 1, 0]
    assert sharing.core(1).foreign.yielded == 1
    sharing.exchange(sharing.core(1).handle(Free("a"), 0.0)[1])
    assert is_idle(agree(sharing))


def test_a_lost_frame_is_caught_up_with(sharing):
    book(sharing, 1, "a")
    sharing.exchange(lost=[1])
    assert sharing.core(2).tracker.foreign_count == 0
    book(sharing, 1, "b", worker_id=2)
    sharing.exchange()
    assert agree(sharing)[rank(1)][1][1] == 1


def test_a_late_joiner_learns_what_all_have_booked():
    sharing = Sharing(1, 2)
    book(sharing, 1, "a")
    sharing.core(1).handle(PrefillComplete("a"), 0.0)
    book(sharing, 2, "b", worker_id=2)
    sharing.exchange()
    late = Sharing(3)
    sharing.worlds += late.worlds
    sharing.now_s = 1.0
    sharing.exchange()
    assert sharing.core(3).tracker.foreign_count == 2
    assert agree(sharing)[rank(1)][1][2] == 1


def test_bookings_of_a_dead_router_are_dropped(sharing):
    book(sharing, 1, "a")
    book(sharing, 2, "b")
    sharing.exchange()
    dead, gone = sharing.worlds.pop(0), []
    for tenth in range(int(10 * SILENCE_S) + 2):
        sharing.now_s = tenth / 10
        sharing.exchange()
        for world in sharing.worlds:
            for worker_id in (1, 2):
                world.report_load(rank(worker_id), sharing.now_s)
            effects = world.core.handle(Tick(), sharing.now_s)[1]
            gone += [each for each in effects if isinstance(each, ReplicaGone)]
            sharing.carry(effects)
    assert gone == [ReplicaGone(1, 1)] * 2
    assert agree(sharing)[rank(1)][1][1] == 1
    assert sharing.core(3).tracker.foreign_count == 1
    assert dead.core.tracker.foreign_count == 1


def test_a_worker_that_goes_takes_the_bookings_of_all_with_it(sharing):
    book(sharing, 1, "a")
    book(sharing, 2, "b", worker_id=2)
    sharing.exchange()
    for world in sharing.worlds:
        (gone,) = world.core.handle(RemoveWorker(1, "withdrawn"), 0.0)[1]
        assert gone.dropped_reservations == (world is sharing.worlds[0])
    sharing.exchange()
    agree(sharing)
    assert sharing.core(3).tracker.foreign_count == 1
    assert [len(list(mirror.reservations)) for mirror in sharing.core(3).foreign.replicas] == [0, 1]


def test_a_reservation_on_a_rank_that_we_do_not_know_yet_waits_for_it(sharing):
    other = Other()
    core = sharing.core(1)
    core.handle(ApplyPeer(other.books("a", rank=9, progress=Progress(True, 2))), 0.0)
    assert core.tracker.foreign_count == 0
    core.handle(UpsertWorker(announcement(9)), 0.0)
    assert core.tracker.foreign_count == 1
    assert core.tracker.active(rank(9)).active_blocks == 2 + 1 + 2
    core.handle(ApplyPeer(other.frees("a")), 0.0)
    core.tracker.check_invariants()
    assert core.tracker.foreign_count == 0


def test_reservations_of_others_are_limited_too():
    core = Sharing(1, max_reservations=2).core(1)
    other = Other()
    core.handle(ApplyPeer(other.books("a", "b", "c")), 0.0)
    assert (core.tracker.foreign_count, core.foreign.refused) == (2, 1)
    assert len(core.tracker) == 0
    core.handle(ApplyPeer(other.frees("a", "b", "c")), 0.0)
    assert core.tracker.foreign_count == 0


def test_inconsistent_replica_is_asked_for_a_snapshot():
    core, other = Sharing(1).core(1), Other()
    other.books("a")
    asked = [TellReplica(5, SnapshotWanted(1))]
    assert core.handle(ApplyPeer(other.beats()), 0.0)[1] == asked
    assert core.handle(ApplyPeer(other.beats()), 0.1)[1] == []
    assert [each for each in core.handle(Tick(), 0.3)[1] if isinstance(each, TellReplica)] == asked


def test_foreign_bookings_are_estimated_as_cached():
    from router.indexer.approximate import ApproximateLimits
    from router.indexer.base import IndexMode
    from router.indexer.predictions import EstimateLimits

    limits = ApproximateLimits(120.0, 1 << 12, 0.8)
    sharing = Sharing(1, 2, mode=IndexMode.APPROXIMATE, estimates=EstimateLimits(None, limits))
    book(sharing, 1, "a")
    sharing.exchange()
    assert [w.core.predictions.entry_counts()[Scope()] for w in sharing.worlds] == [10, 10]


def give(sharing, giver, heir):
    """All that one router has booked, to another; the progress that it receives."""
    lot = tuple(sharing.core(giver).tracker.all_shared())
    return sharing.core(heir).handle(ApplyPeer(HandedOver(giver, lot)), sharing.now_s)[1]


@pytest.mark.parametrize(("giver", "heir"), [(1, 2), (3, 2)])
def test_a_router_that_stops_hands_over_what_it_has_booked(sharing, giver, heir):
    book(sharing, giver, "a")
    book(sharing, giver, "b", worker_id=2)
    sharing.core(giver).handle(PrefillComplete("a"), 0.0)
    sharing.exchange()
    before = agree(sharing)
    sharing.exchange(give(sharing, giver, heir))
    assert agree(sharing) == before
    assert len(sharing.core(giver).tracker) == 0
    assert len(sharing.core(heir).tracker) == 2
    for world in sharing.worlds:
        world.core.handle(Tick(), SILENCE_S / 2)
        assert world.core.foreign.replicas.owners("a") in {(heir,), ()}
    sharing.exchange(sharing.core(giver).handle(Free("a"), 0.0)[1])
    sharing.exchange(sharing.core(heir).handle(Free("b"), 0.0)[1])
    assert is_idle(agree(sharing))


def test_handed_over_reservation_outlives_its_router(sharing):
    book(sharing, 1, "a")
    sharing.exchange()
    sharing.exchange(give(sharing, 1, 2))
    sharing.now_s = SILENCE_S + 1.0
    heir = sharing.core(2)
    heir.handle(Tick(), sharing.now_s)
    assert len(heir.foreign.replicas) == 0
    assert len(heir.tracker) == 1
    heir.handle(PrefillComplete("a"), sharing.now_s)
    heir.handle(Free("a"), sharing.now_s)


def test_repeated_handover_is_taken_once(sharing):
    book(sharing, 1, "a")
    sharing.exchange()
    told = give(sharing, 1, 2)
    assert give(sharing, 1, 2) == told != []
    assert sharing.core(2).foreign.inherited == 1


def test_handover_on_an_unknown_rank_is_ignored(sharing):
    book(sharing, 1, "a", worker_id=2)
    sharing.core(2).handle(RemoveWorker(2, "withdrawn"), 0.0)
    assert give(sharing, 1, 2) == []
    assert len(sharing.core(2).tracker) == 0


def test_handovers_are_limited_like_bookings():
    sharing = Sharing(1, 2, max_reservations=1)
    book(sharing, 1, "a")
    book(sharing, 2, "b")
    assert give(sharing, 1, 2) == []


def test_a_worker_with_another_block_size_at_another_router_is_named_until_it_agrees():
    world, other = World(router_id=1), Other()
    world.worker(1)
    handle = world.core.handle
    handle(ApplyPeer(other.books("a", block_size=16)), 0.0)
    assert world.core.foreign.differing == {(5, 1): (16, 4)}
    handle(ApplyPeer(other.books("b")), 0.0)
    assert world.core.foreign.differing == {}
    handle(ApplyPeer(other.books("c", block_size=16)), 0.0)
    handle(Tick(), SILENCE_S)
    assert world.core.foreign.differing == {}


def test_reservations_on_ranks_unknown_here_are_counted_until_they_are_known():
    world, other = World(router_id=1), Other()
    world.worker(1)
    world.core.handle(ApplyPeer(other.books("a", "b", rank=2)), 0.0)
    world.core.handle(ApplyPeer(other.books("c")), 0.0)
    assert (world.core.foreign.unplaced, world.core.tracker.foreign_count) == (2, 1)
    world.worker(2)
    assert (world.core.foreign.unplaced, world.core.tracker.foreign_count) == (0, 3)
