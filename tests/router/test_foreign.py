"""Several routers' cores: what one books weighs at the others, and what is told anywhere counts."""

import pytest

from builders import announcement, rank
from peers import Other, Sharing
from router.effects import ReplicaGone, TellReplica, UsageTold
from router.errors import DuplicateReservationError, ReservationNotFoundError
from router.protocol.replicas import HandedOver, Progress, PromptUsage, SnapshotWanted
from router.protocol.requests import ReserveRequest
from router.protocol.values import Scope
from router.sequence.prompt import prepare
from router.sequence.replicas import SILENCE_S

PROMPT = list(range(42))


@pytest.fixture
def sharing():
    return Sharing(1, 2, 3)


def book(sharing, router_id, request_id, worker_id=1, tokens=PROMPT):
    request = ReserveRequest(token_ids=tokens, request_id=request_id, worker_id=worker_id)
    prompt = prepare(request, ())
    return sharing.core(router_id).reserve(request, prompt, sharing.now_s)[1]


def agree(sharing):
    first, *others = sharing.loads()
    assert all(each == first for each in others)
    return first


def is_idle(load):
    return not any(number for columns in load.values() for each in columns for number in each)


def test_what_one_router_books_weighs_at_all(sharing):
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
    core.prefill_complete("a", 0.0)
    core.output_block("a", None, 0.0)
    core.output_block("a", 0.5, 0.0)
    sharing.now_s = 1.0
    sharing.exchange()
    load = agree(sharing)
    assert load[rank(1)][0] == [0, 0]
    assert load[rank(1)][1] == [6.0 + 1, 1, 1, 42 + 8]
    core.free("a", 1.0)
    sharing.exchange()
    assert is_idle(agree(sharing))


def test_the_next_choice_of_another_router_sees_it(sharing):
    """Two equal ranks: one is taken, so the other router takes the other."""
    placement, _ = sharing.worlds[0].book("a", PROMPT)
    sharing.exchange()
    assert sharing.worlds[1].select(list(range(100, 142))).rank != placement.rank


@pytest.mark.parametrize("told", ["prefill_complete", "output_block", "free"])
def test_any_router_may_be_told_of_a_request(sharing, told):
    book(sharing, 1, "a")
    sharing.exchange()
    arguments = ("a", None, 0.0) if told == "output_block" else ("a", 0.0)
    effects = getattr(sharing.core(3), told)(*arguments)
    sharing.now_s = 1.0
    sharing.exchange(effects)
    load = agree(sharing)
    assert is_idle(load) == (told == "free")
    assert (load[rank(1)][0][0] == 0) == (told != "output_block")
    assert load[rank(1)][1][0] == {"prefill_complete": 11, "output_block": 12, "free": 0}[told]


@pytest.mark.parametrize("told", ["prefill_complete", "free"])
def test_a_usage_reaches_whoever_expected_something_and_counts_once(sharing, told):
    book(sharing, 1, "a")
    sharing.exchange()
    usage = PromptUsage(42, 40)
    (passed_on,) = getattr(sharing.core(3), told)("a", 0.0, usage)
    assert passed_on.router_id == 1
    assert sharing.core(1).apply_peer(passed_on.message, 0.0) == [UsageTold(usage, 0)]
    assert sharing.core(1).apply_peer(passed_on.message, 0.0) == []


def test_nobodys_request_is_nobodys(sharing):
    for told in ("prefill_complete", "free"):
        with pytest.raises(ReservationNotFoundError):
            getattr(sharing.core(3), told)("a", 0.0)


def test_a_request_booked_anew_elsewhere_counts_once(sharing):
    """A caller that heard nothing from one router asks the next one."""
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
    sharing.exchange(sharing.core(1).free("a", 0.0))
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
    sharing.core(1).prefill_complete("a", 0.0)
    book(sharing, 2, "b", worker_id=2)
    sharing.exchange()
    late = Sharing(3)
    sharing.worlds += late.worlds
    sharing.now_s = 1.0
    sharing.exchange()
    assert sharing.core(3).tracker.foreign_count == 2
    assert agree(sharing)[rank(1)][1][2] == 1


def test_nothing_of_a_dead_router_is_left(sharing):
    book(sharing, 1, "a")
    book(sharing, 2, "b")
    sharing.exchange()
    dead, gone = sharing.worlds.pop(0), []
    for tenth in range(int(10 * SILENCE_S) + 2):
        sharing.now_s = tenth / 10
        sharing.exchange()
        for world in sharing.worlds:
            for worker_id in (1, 2):
                world.hear(rank(worker_id), sharing.now_s)
            effects = world.core.tick(sharing.now_s)
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
        (gone,) = world.core.remove_worker(1, "withdrawn")
        assert gone.dropped_reservations == (world is sharing.worlds[0])
    sharing.exchange()
    agree(sharing)
    assert sharing.core(3).tracker.foreign_count == 1
    assert [len(list(mirror.reservations)) for mirror in sharing.core(3).foreign.replicas] == [0, 1]


def test_a_reservation_on_a_rank_that_we_do_not_know_yet_waits_for_it(sharing):
    other = Other()
    core = sharing.core(1)
    core.apply_peer(other.books("a", rank=9, progress=Progress(True, 2)), 0.0)
    assert core.tracker.foreign_count == 0
    core.upsert_worker(announcement(9), 0.0)
    assert core.tracker.foreign_count == 1
    assert core.tracker.active(rank(9)).active_blocks == 2 + 1 + 2
    core.apply_peer(other.frees("a"), 0.0)
    core.tracker.check_invariants()
    assert core.tracker.foreign_count == 0


def test_reservations_of_others_are_limited_too():
    core = Sharing(1, max_reservations=2).core(1)
    other = Other()
    core.apply_peer(other.books("a", "b", "c"), 0.0)
    assert (core.tracker.foreign_count, core.foreign.refused) == (2, 1)
    assert len(core.tracker) == 0
    core.apply_peer(other.frees("a", "b", "c"), 0.0)
    assert core.tracker.foreign_count == 0


def test_asks_whom_it_does_not_understand():
    core, other = Sharing(1).core(1), Other()
    other.books("a")
    asked = [TellReplica(5, SnapshotWanted(1))]
    assert core.apply_peer(other.beats(), 0.0) == asked
    assert core.apply_peer(other.beats(), 0.1) == []
    assert [each for each in core.tick(0.3) if isinstance(each, TellReplica)] == asked


def test_what_others_book_is_guessed_to_be_cached_where_guesses_count():
    from router.indexer.approximate import ApproximateLimits
    from router.indexer.base import IndexMode

    limits = ApproximateLimits(120.0, 1 << 12, 0.8)
    sharing = Sharing(1, 2, mode=IndexMode.APPROXIMATE, prediction=limits)
    book(sharing, 1, "a")
    sharing.exchange()
    assert [w.core.predictions.entry_counts()[Scope()] for w in sharing.worlds] == [10, 10]


def give(sharing, giver, heir):
    """All that one router has booked, to another; what it is told of it."""
    lot = tuple(sharing.core(giver).tracker.all_shared())
    return sharing.core(heir).apply_peer(HandedOver(giver, lot), sharing.now_s)


@pytest.mark.parametrize(("giver", "heir"), [(1, 2), (3, 2)])
def test_a_router_that_stops_hands_over_what_it_has_booked(sharing, giver, heir):
    book(sharing, giver, "a")
    book(sharing, giver, "b", worker_id=2)
    sharing.core(giver).prefill_complete("a", 0.0)
    sharing.exchange()
    before = agree(sharing)
    sharing.exchange(give(sharing, giver, heir))
    assert agree(sharing) == before
    assert len(sharing.core(giver).tracker) == 0
    assert len(sharing.core(heir).tracker) == 2
    for world in sharing.worlds:
        world.core.tick(SILENCE_S / 2)
        assert world.core.foreign.replicas.owners("a") in {(heir,), ()}
    sharing.exchange(sharing.core(giver).free("a", 0.0))
    sharing.exchange(sharing.core(heir).free("b", 0.0))
    assert is_idle(agree(sharing))


def test_what_is_handed_over_lives_on_when_its_router_is_silent(sharing):
    book(sharing, 1, "a")
    sharing.exchange()
    sharing.exchange(give(sharing, 1, 2))
    sharing.now_s = SILENCE_S + 1.0
    heir = sharing.core(2)
    heir.tick(sharing.now_s)
    assert len(heir.foreign.replicas) == 0
    assert len(heir.tracker) == 1
    heir.prefill_complete("a", sharing.now_s)
    heir.free("a", sharing.now_s)


def test_what_is_handed_over_twice_is_taken_once(sharing):
    book(sharing, 1, "a")
    sharing.exchange()
    told = give(sharing, 1, 2)
    assert give(sharing, 1, 2) == told != []
    assert sharing.core(2).foreign.inherited == 1


def test_nothing_is_inherited_on_a_rank_that_is_not_known(sharing):
    book(sharing, 1, "a", worker_id=2)
    sharing.core(2).remove_worker(2, "withdrawn")
    assert give(sharing, 1, 2) == []
    assert len(sharing.core(2).tracker) == 0


def test_no_more_is_inherited_than_may_be_booked():
    sharing = Sharing(1, 2, max_reservations=1)
    book(sharing, 1, "a")
    book(sharing, 2, "b")
    assert give(sharing, 1, 2) == []
