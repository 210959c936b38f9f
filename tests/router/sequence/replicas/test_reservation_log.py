"""The frames of our reservations for other routers, and their sizes."""

from msgspec.structs import replace

from router.protocol.replicas import Progress
from router.sequence.replicas.reservation_log import (
    GROWTH_S,
    HEARTBEAT_S,
    MAX_BYTES,
    MAX_CHANGES,
    ReservationLog,
)
from support.fleets.peers import reservation

GREW = Progress(True, 3, 0.5)


def ledger(*live):
    made = ReservationLog(router_id=1, incarnation=2)
    booked = {each.request_id: each for each in live}
    for request_id in booked:
        made.touch(request_id)
    return made, booked


def names(reservations):
    return [each.request_id for each in reservations]


def test_frame_has_the_state_of_each_request():
    made, booked = ledger(reservation("a"), reservation("b"))
    first = made.take_frame(booked.get, 0.0)
    assert (first.router_id, first.incarnation, first.sequence) == (1, 2, 1)
    assert (names(first.added), first.count) == (["a", "b"], 2)
    booked["a"] = replace(booked["a"], progress=GREW)
    del booked["b"]
    for request_id in ("a", "a", "b"):
        made.touch(request_id)
    second = made.take_frame(booked.get, 0.0)
    assert second.added == ()
    assert second.progressed == (("a", GREW),)
    assert second.freed == ("b",)
    assert (second.sequence, second.count) == (2, 1)


def test_reservation_ended_between_two_frames_is_omitted():
    made, booked = ledger(reservation("a"))
    booked.clear()
    made.touch("a")
    assert made.take_frame(booked.get, 0.0).change_count == 0


def test_id_reused_between_two_frames_is_sent_whole():
    made, booked = ledger(reservation("a"))
    made.take_frame(booked.get, 0.0)
    booked["a"] = reservation("a", rank=2, progress=GREW)
    made.touch("a")
    assert made.take_frame(booked.get, 0.0).added == (booked["a"],)


def test_heartbeats_are_periodic_and_immediate_for_new_replicas():
    made, booked = ledger()
    assert made.take_frame(booked.get, 5.0).sequence == 0
    assert made.take_frame(booked.get, 5.0 + HEARTBEAT_S / 2) is None
    made.request_frame()
    assert made.take_frame(booked.get, 5.0 + HEARTBEAT_S / 2).change_count == 0
    assert made.take_frame(booked.get, 5.0 + HEARTBEAT_S) is None
    assert made.take_frame(booked.get, 5.0 + 2 * HEARTBEAT_S).change_count == 0


def test_output_blocks_are_sent_together():
    made, booked = ledger(reservation("a"))
    made.take_frame(booked.get, 0.0)
    reported = []
    for step in range(1, 101):
        booked["a"] = replace(booked["a"], progress=Progress(True, step))
        made.touch_later("a")
        frame = made.take_frame(booked.get, step * GROWTH_S / 10)
        reported += frame.progressed if frame is not None else ()
    assert len(reported) == 10
    assert reported[-1][1].output_blocks > 90


def test_a_frame_has_a_limit_and_the_rest_comes_next():
    made, booked = ledger(*(reservation(str(i)) for i in range(MAX_CHANGES + 5)))
    assert made.take_frame(booked.get, 0.0).change_count == MAX_CHANGES
    assert made.is_behind
    assert made.take_frame(booked.get, 0.0).change_count == 5
    assert not made.is_behind
    large = MAX_BYTES // 8 // 2
    made, booked = ledger(*(reservation(str(i), blocks=large) for i in range(5)))
    counts = [made.take_frame(booked.get, 0.0).change_count for _ in range(3)]
    assert counts == [2, 2, 1]
    assert [len(part.reservations) for part in made.snapshot()] == [2, 2, 1]


def test_a_snapshot_is_of_one_moment_though_its_parts_are_made_later():
    made, booked = ledger(reservation("a"))
    assert [part.reservations for part in made.snapshot()] == [()]
    made.take_frame(booked.get, 0.0)
    booked["b"] = reservation("b")
    made.touch("b")
    parts = made.snapshot()
    made.take_frame(booked.get, 0.0)
    (part,) = parts
    assert (part.sequence, part.part, part.parts, names(part.reservations)) == (1, 0, 1, ["a"])


def test_sender_is_woken_once_for_all_changes():
    woken = []
    made = ReservationLog(1, 2, lambda: woken.append(True))
    booked = {request_id: reservation(request_id) for request_id in "ab"}
    for request_id in booked:
        made.touch(request_id)
    made.touch_later("a")
    assert len(woken) == 1
    made.take_frame(booked.get, 0.0)
    made.touch("a")
    made.request_frame()
    assert len(woken) == 3
