"""What the others are told of our reservations, and how much at once."""

from msgspec.structs import replace

from peers import reservation
from router.protocol.replicas import Progress
from router.sequence.ledger import (
    GROWTH_S,
    HEARTBEAT_S,
    MAX_BYTES,
    MAX_CHANGES,
    Ledger,
)

GREW = Progress(True, 3, 0.5)


def ledger(*live):
    made = Ledger(router_id=1, incarnation=2)
    booked = {each.request_id: each for each in live}
    for request_id in booked:
        made.touch(request_id)
    return made, booked


def names(reservations):
    return [each.request_id for each in reservations]


def test_a_frame_says_how_each_request_stands_by_then():
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


def test_what_came_and_went_between_two_frames_is_not_told():
    made, booked = ledger(reservation("a"))
    booked.clear()
    made.touch("a")
    assert made.take_frame(booked.get, 0.0).change_count == 0


def test_an_id_used_again_between_two_frames_is_told_whole():
    made, booked = ledger(reservation("a"))
    made.take_frame(booked.get, 0.0)
    booked["a"] = reservation("a", rank=2, progress=GREW)
    made.touch("a")
    assert made.take_frame(booked.get, 0.0).added == (booked["a"],)


def test_says_something_from_time_to_time_and_at_once_to_newcomers():
    made, booked = ledger()
    assert made.take_frame(booked.get, 5.0).sequence == 0
    assert made.take_frame(booked.get, 5.0 + HEARTBEAT_S / 2) is None
    made.greet()
    assert made.take_frame(booked.get, 5.0 + HEARTBEAT_S / 2).change_count == 0
    assert made.take_frame(booked.get, 5.0 + HEARTBEAT_S) is None
    assert made.take_frame(booked.get, 5.0 + 2 * HEARTBEAT_S).change_count == 0


def test_output_blocks_are_told_together():
    made, booked = ledger(reservation("a"))
    made.take_frame(booked.get, 0.0)
    told = []
    for step in range(1, 101):
        booked["a"] = replace(booked["a"], progress=Progress(True, step))
        made.touch_later("a")
        frame = made.take_frame(booked.get, step * GROWTH_S / 10)
        told += frame.progressed if frame is not None else ()
    assert len(told) == 10
    assert told[-1][1].output_blocks > 90


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


def test_wakes_who_tells_it_once_for_all_that_is_new():
    woken = []
    made = Ledger(1, 2, lambda: woken.append(True))
    booked = {request_id: reservation(request_id) for request_id in "ab"}
    for request_id in booked:
        made.touch(request_id)
    made.touch_later("a")
    assert len(woken) == 1
    made.take_frame(booked.get, 0.0)
    made.touch("a")
    made.greet()
    assert len(woken) == 3
