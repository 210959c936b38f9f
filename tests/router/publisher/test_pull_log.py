"""Events that are told once: gaps are losses, numbers that go back a new life."""

import pytest

from router.publisher.engine_steps import ApplyDecoded, NewLife
from router.publisher.pull_log import PullLog
from router.publisher.trtllm_events import TrtllmBatch


def taken(log, first, last):
    steps = log.take(TrtllmBatch(None, [], [], [], first, last))
    assert isinstance(steps[-1], ApplyDecoded)
    assert (steps[-1].sequence, log.cursor) == (first, last + 1)
    return [type(step) if isinstance(step, NewLife) else (step.first, step.last)
            for step in steps[:-1]]  # fmt: skip


def test_events_in_their_turn_are_applied():
    log = PullLog()
    assert (taken(log, 0, 4), taken(log, 5, 5)) == ([], [])


def test_a_history_that_began_before_us_is_lost():
    assert taken(PullLog(), 7, 9) == [(0, 6)]


def test_a_gap_is_a_loss():
    log = PullLog()
    taken(log, 0, 4)
    assert taken(log, 7, 9) == [(5, 6)]


@pytest.mark.parametrize(("first", "lost"), [(0, []), (2, [(0, 1)])])
def test_numbers_that_go_back_begin_a_new_life(first, lost):
    log = PullLog()
    taken(log, 0, 4)
    assert taken(log, first, 9) == [NewLife, *lost]


def test_a_restarted_process_goes_on_only_where_it_stopped():
    assert taken(PullLog(5), 5, 6) == []
    assert taken(PullLog(5), 6, 6) == [(5, 5)]
    assert taken(PullLog(5), 0, 6) == [NewLife]
