"""What we know of the other routers: in order, healed by snapshots, gone when they are."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from router.sequence.replicas.peer_reservations import FIRST_RETRY_S, HELD_FRAMES, LAST_RETRY_S
from router.sequence.replicas.replica_set import AWAY_S, MAX_REPLICAS, SILENCE_S, ReplicaSet
from support.fleets.peers import Other


@pytest.fixture
def replicas():
    made = ReplicaSet(router_id=1)
    yield made
    made.check_invariants()


@pytest.fixture
def other():
    return Other()


def began(changes):
    return [each.request_id for each in changes if each.before is None]


def ended(changes):
    return [each.request_id for each in changes if each.after is None]


def known(replicas):
    return sorted((m.router_id, each.request_id) for m in replicas for each in m.reservations)


def test_a_frame_is_applied_once(replicas, other):
    frame = other.books("a", "b")
    assert began(replicas.take(frame, 0.0)) == ["a", "b"]
    assert replicas.take(frame, 0.0) == []
    assert ended(replicas.take(other.frees("a"), 0.0)) == ["a"]
    assert known(replicas) == [(5, "b")]
    assert (replicas.counts.frames.applied, replicas.counts.frames.doubled) == (2, 1)


def test_frames_out_of_order_wait_for_each_other(replicas, other):
    first, second, third = other.books("a"), other.books("b"), other.frees("a")
    assert replicas.take(third, 0.0) == []
    assert replicas.take(second, 0.0) == []
    assert replicas.in_doubt == [5]
    assert began(replicas.take(first, 0.0)) == ["a", "b"]
    assert replicas.in_doubt == []
    assert known(replicas) == [(5, "b")]


@pytest.mark.parametrize("notice", ["frame", "heartbeat"])
def test_a_lost_frame_is_noticed_and_healed_by_a_snapshot(replicas, other, notice):
    replicas.take(other.books("a"), 0.0)
    other.frees("a")
    replicas.take(other.books("b") if notice == "frame" else other.beats(), 0.0)
    assert replicas.wanted(0.0) == [5]
    changes = [each for part in other.snapshot(2) for each in replicas.take(part, 0.0)]
    assert ended(changes) == ["a"]
    assert began(changes) == (["b"] if notice == "frame" else [])
    assert replicas.wanted(100.0) == []
    assert (replicas.counts.frames.missing, replicas.counts.frames.snapshots) == (1, 1)


def test_late_replica_requests_a_snapshot(replicas, other):
    other.books("a")
    replicas.take(other.beats(), 0.0)
    assert replicas.wanted(0.0) == [5]
    (part,) = other.snapshot()
    assert began(replicas.take(part, 0.0)) == ["a"]


def test_frames_that_follow_a_snapshot_may_come_before_it(replicas, other):
    other.books("a")
    (part,) = other.snapshot()
    assert replicas.take(other.books("b"), 0.0) == []
    assert began(replicas.take(part, 0.0)) == ["a", "b"]


def test_a_snapshot_from_before_what_we_know_is_passed_over(replicas, other):
    replicas.take(other.books("a"), 0.0)
    (old,) = other.snapshot()
    replicas.take(other.frees("a"), 0.0)
    other.books("b")
    replicas.take(other.beats(), 0.0)
    assert replicas.take(old, 0.0) == []
    assert known(replicas) == []
    assert began(replicas.take(other.snapshot()[0], 0.0)) == ["b"]


def test_another_digest_is_noticed_and_healed(replicas, other):
    replicas.take(other.books("a"), 0.0)
    (mirror,) = replicas
    mirror.reservations.pop("a")
    replicas.take(other.beats(), 0.0)
    assert replicas.wanted(0.0) == [5]
    assert replicas.take(other.books("b"), 0.0) == []
    replicas.take(other.snapshot()[0], 0.0)
    assert known(replicas) == [(5, "a"), (5, "b")]
    assert replicas.counts.frames.differing == 1


def test_asks_again_less_and_less_often(replicas, other):
    other.books("a")
    replicas.take(other.beats(), 0.0)
    asked = [tenth for tenth in range(200) if replicas.wanted(tenth / 10)]
    gaps = [(b - a) / 10 for a, b in pairwise(asked)]
    assert gaps[0] <= 2 * FIRST_RETRY_S
    assert gaps[-1] == pytest.approx(LAST_RETRY_S)


def test_held_frames_are_bounded_and_replaced_by_a_snapshot(replicas, other):
    frames = [other.books(str(i)) for i in range(HELD_FRAMES + 10)]
    for frame in frames[1:]:
        replicas.take(frame, 0.0)
    (mirror,) = replicas
    assert len(mirror._held) == HELD_FRAMES
    replicas.take(other.snapshot()[0], 0.0)
    assert len(known(replicas)) == len(frames)


def test_a_silent_router_is_gone_with_all_it_booked(replicas, other):
    replicas.take(other.books("a"), 0.0)
    replicas.take(Other(6).books("a"), 1.0)
    assert replicas.owners("a") == (5, 6)
    assert replicas.tick(SILENCE_S - 0.1, is_connected=True) == []
    assert ended(replicas.tick(SILENCE_S, is_connected=True)) == ["a"]
    assert replicas.owners("a") == (6,)
    assert (len(replicas), replicas.counts.gone) == (1, 1)


def test_no_replica_is_removed_while_disconnected(replicas, other):
    replicas.take(other.books("a"), 0.0)
    assert replicas.tick(100.0, is_connected=False) == []
    assert replicas.tick(200.0, is_connected=True) == []
    assert replicas.tick(200.0 + SILENCE_S - 0.1, is_connected=True) == []
    assert ended(replicas.tick(200.0 + SILENCE_S, is_connected=True)) == ["a"]


def test_replica_is_removed_after_a_long_disconnection(replicas, other):
    replicas.take(other.books("a"), 0.0)
    assert replicas.tick(1.0, is_connected=False) == []
    assert replicas.tick(0.9 + AWAY_S, is_connected=False) == []
    assert ended(replicas.tick(1.0 + AWAY_S, is_connected=False)) == ["a"]


def test_a_new_life_ends_the_old_one(replicas, other):
    late = other.books("a")
    replicas.take(late, 0.0)
    reborn = Other(incarnation=2)
    changes = replicas.take(reborn.books("b"), 0.0)
    assert (ended(changes), began(changes)) == (["a"], ["b"])
    assert replicas.take(late, 0.0) == []
    assert replicas.take(other.books("c"), 0.0) == []
    assert known(replicas) == [(5, "b")]
    assert replicas.counts.stale == 2


def test_progress_replaces_nothing_else(replicas, other):
    replicas.take(other.books("a"), 0.0)
    (before,) = other.has
    after = replace(before, progress=replace(before.progress, is_prefill_complete=True))
    other.has.put(after)
    frame = other.frame(progressed=(("a", after.progress), ("unknown", after.progress)))
    (change,) = replicas.take(frame, 0.0)
    assert (change.before, change.after) == (before, after)
    assert replicas.in_doubt == []


def test_own_frames_and_unrequested_snapshots_are_ignored(replicas, other):
    assert replicas.take(Other(1).books("a"), 0.0) == []
    other.books("a")
    assert replicas.take(other.snapshot()[0], 0.0) == []
    assert len(replicas) == 0


def test_routers_are_followed_up_to_a_limit(replicas):
    for router_id in range(2, MAX_REPLICAS + 4):
        replicas.take(Other(router_id).books("a"), 0.0)
    assert (len(replicas), replicas.counts.refused) == (MAX_REPLICAS, 2)
