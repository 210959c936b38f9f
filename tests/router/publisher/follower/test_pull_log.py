"""Events that are read once: gaps are losses, numbers that go back a new life."""

import pytest

from router.publisher.batch_order.steps import ApplyDecoded, NewLife
from router.publisher.engine_events.trtllm import TrtllmBatch
from router.publisher.follower.pull_follower import PollOrder


def taken(log, first, last):
    steps = log.take(TrtllmBatch(None, [], [], [], first_event_id=first, last_event_id=last))
    assert isinstance(steps[-1], ApplyDecoded)
    assert (steps[-1].sequence, log.cursor) == (first, last + 1)
    return [type(step) if isinstance(step, NewLife) else (step.first, step.last)
            for step in steps[:-1]]  # fmt: skip


def test_events_in_their_turn_are_applied():
    log = PollOrder()
    assert (taken(log, 0, 4), taken(log, 5, 5)) == ([], [])


def test_a_history_that_began_before_us_is_lost():
    assert taken(PollOrder(), 7, 9) == [(0, 6)]


def test_a_gap_is_a_loss():
    log = PollOrder()
    taken(log, 0, 4)
    assert taken(log, 7, 9) == [(5, 6)]


@pytest.mark.parametrize(("first", "lost"), [(0, []), (2, [(0, 1)])])
def test_numbers_that_go_back_begin_a_new_life(first, lost):
    log = PollOrder()
    taken(log, 0, 4)
    assert taken(log, first, 9) == [NewLife, *lost]


def test_a_restarted_process_goes_on_only_where_it_stopped():
    assert taken(PollOrder(5), 5, 6) == []
    assert taken(PollOrder(5), 6, 6) == [(5, 5)]
    assert taken(PollOrder(5), 0, 6) == [NewLife]
