"""What is said of requests that were given away reaches who has them, in any order."""

import pytest

from router.bequest import Bequest
from router.protocol.replicas import OutputBlockAdded, ProgressTold, ReservationFreed

FREED = ProgressTold("a", ReservationFreed())


def given(*heirs):
    bequest = Bequest()
    for heir in heirs:
        bequest.give(heir, ["a"])
    return bequest


def nobody(_):
    return ()


def heir_has_it(_):
    return (2,)


def test_who_says_that_it_has_it_is_told_nothing():
    bequest = given(2)
    assert bequest.heirs(FREED, is_booked=True) == ()
    assert bequest.is_settled(["a"], heir_has_it)


def test_an_end_that_is_told_while_the_gift_is_on_its_way_reaches_the_heir():
    """Which of the two is the heir's word nobody can say, and need not."""
    bequest = given(2)
    assert bequest.heirs(FREED, is_booked=True) == ()
    assert not bequest.is_settled(["a"], nobody)
    assert bequest.heirs(FREED, is_booked=False) == (2,)
    assert bequest.is_settled(["a"], nobody)


def test_an_end_that_a_caller_of_ours_told_reaches_the_heir():
    bequest = given(2)
    assert not bequest.is_settled(["a"], nobody)
    assert bequest.heirs(FREED, is_booked=False) == (2,)
    assert bequest.is_settled(["a"], nobody)


def test_an_heirs_frame_may_come_before_its_word():
    """Then it is booked here no more, and has not ended."""
    bequest = given(2)
    assert list(bequest.request_ids) == ["a"]
    bequest.yielded(["a"])
    assert not bequest.is_settled(["a"], heir_has_it)
    assert bequest.heirs(FREED, is_booked=False) == ()
    assert bequest.is_settled(["a"], heir_has_it)
    assert bequest.heirs(FREED, is_booked=False) == (2,)


def test_what_was_given_twice_is_said_twice_to_be_there():
    bequest = given(2, 2)
    told = [bequest.heirs(FREED, is_booked=each) for each in (True, False, False)]
    assert told == [(), (), (2,)]


def test_of_two_heirs_both_are_told():
    bequest = given(2, 3)
    assert [bequest.heirs(FREED, is_booked=each) for each in (True, False, False)] == [
        (),
        (),
        (2, 3),
    ]


@pytest.mark.parametrize("is_booked", [True, False])
def test_progress_is_passed_on(is_booked):
    told = ProgressTold("a", OutputBlockAdded())
    assert given(2).heirs(told, is_booked=is_booked) == (2,)


def test_others_requests_are_nobodys_business():
    bequest = given(2)
    assert bequest.heirs(ProgressTold("b", ReservationFreed()), is_booked=False) == ()
    assert bequest.is_settled(["b"], nobody)


def test_what_comes_back_is_ours_again():
    """Of two routers that stop at once each may be the other's heir."""
    bequest = given(2)
    bequest.take_back(["a"])
    assert bequest.heirs(FREED, is_booked=True) == ()
    assert bequest.heirs(FREED, is_booked=False) == ()
