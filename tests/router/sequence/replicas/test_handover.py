"""Progress of handed-over requests reaches their new router, in any order."""

import pytest

from router.protocol.replicas import OutputBlockAdded, ProgressTold, ReservationFreed
from router.sequence.replicas.handover import Handover

FREED = ProgressTold("a", ReservationFreed())


def given(*recipients):
    handover = Handover()
    for heir in recipients:
        handover.give(heir, ["a"])
    return handover


def nobody(_):
    return ()


def heir_has_it(_):
    return (2,)


def test_confirmed_heir_receives_no_further_progress():
    handover = given(2)
    assert handover.recipients(FREED, is_booked=True) == ()
    assert handover.is_settled(["a"], heir_has_it)


def test_end_during_the_handover_reaches_the_heir():
    """Which of the two is the heir's message is unknown, and does not matter."""
    handover = given(2)
    assert handover.recipients(FREED, is_booked=True) == ()
    assert not handover.is_settled(["a"], nobody)
    assert handover.recipients(FREED, is_booked=False) == (2,)
    assert handover.is_settled(["a"], nobody)


def test_end_reported_by_a_caller_reaches_the_heir():
    handover = given(2)
    assert not handover.is_settled(["a"], nobody)
    assert handover.recipients(FREED, is_booked=False) == (2,)
    assert handover.is_settled(["a"], nobody)


def test_an_heirs_frame_may_come_before_its_word():
    """Then it is booked here no more, and has not ended."""
    handover = given(2)
    assert list(handover.request_ids) == ["a"]
    handover.yielded(["a"])
    assert not handover.is_settled(["a"], heir_has_it)
    assert handover.recipients(FREED, is_booked=False) == ()
    assert handover.is_settled(["a"], heir_has_it)
    assert handover.recipients(FREED, is_booked=False) == (2,)


def test_repeated_handover_is_confirmed_twice():
    handover = given(2, 2)
    reported = [handover.recipients(FREED, is_booked=each) for each in (True, False, False)]
    assert reported == [(), (), (2,)]


def test_end_reaches_both_heirs():
    handover = given(2, 3)
    assert [handover.recipients(FREED, is_booked=each) for each in (True, False, False)] == [
        (),
        (),
        (2, 3),
    ]


@pytest.mark.parametrize("is_booked", [True, False])
def test_progress_is_passed_on(is_booked):
    reported = ProgressTold("a", OutputBlockAdded())
    assert given(2).recipients(reported, is_booked=is_booked) == (2,)


def test_progress_of_other_requests_is_ignored():
    handover = given(2)
    assert handover.recipients(ProgressTold("b", ReservationFreed()), is_booked=False) == ()
    assert handover.is_settled(["b"], nobody)


def test_returned_reservation_is_ours_again():
    """Of two routers that stop at once each may be the other's heir."""
    handover = given(2)
    handover.take_back(["a"])
    assert handover.recipients(FREED, is_booked=True) == ()
    assert handover.recipients(FREED, is_booked=False) == ()
