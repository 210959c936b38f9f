"""The factor between reported and passed time, from intervals of uninterrupted work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.loads import LoadCounters, LoadGauges
from router.scheduler.predictor.busy_clock import MOST, BusyClock

WORKING = LoadGauges(running_requests=2)


def counted(busy_s, steps=4, **fields):
    return LoadCounters(steps=steps, busy_s=busy_s, **{"decode_requests": 2 * steps, **fields})


def factor_of(intervals):
    clock = BusyClock()
    clock.note(WORKING, counted(1.0), 1.0)
    for busy_s, elapsed_s in intervals:
        clock.note(WORKING, counted(busy_s), elapsed_s)
    return clock.factor


def test_engine_is_believed_before_it_has_worked():
    assert BusyClock().factor == 1.0


@pytest.mark.parametrize("times", [0.001, 0.5, 1.0, 3.0, 1_000.0])
def test_constant_factor_is_removed(times):
    assert factor_of([(times, 1.0)] * 800) * times == pytest.approx(1.0, rel=0.01)


def test_three_times_the_time_is_mostly_known_after_ten_seconds():
    assert factor_of([(3.0, 1.0)] * 10) == pytest.approx(1 / 3, rel=0.15)


@given(st.lists(st.floats(0.0, 0.5), min_size=100, max_size=100))
def test_steps_divided_by_reports_do_not_matter(unreported_s):
    """Each report lacks the beginning of a step, which the next one contains."""
    before = [0.0, *unreported_s]
    busy_s = [1.0 + then - now for then, now in zip(before, unreported_s, strict=False)]
    assert factor_of([(each, 1.0) for each in busy_s]) == pytest.approx(1.0, abs=0.02)


def test_step_longer_than_reports_counts_when_it_ends():
    clock = BusyClock()
    clock.note(WORKING, counted(1.0), 1.0)
    for _ in range(20):
        clock.note(WORKING, counted(0.0, steps=0), 1.0)
    clock.note(WORKING, counted(20.5, steps=1), 1.0)
    assert clock.factor == pytest.approx(1.0, rel=0.03)


def test_step_that_began_before_the_work_is_left_out():
    clock = BusyClock()
    for _ in range(50):
        clock.note(LoadGauges(), counted(0.0, steps=0), 1.0)
        clock.note(WORKING, counted(1.7), 1.0)
        clock.note(WORKING, counted(1.0), 1.0)
    assert clock.factor == 1.0


@pytest.mark.parametrize(
    ("gauges", "fields"),
    [
        (LoadGauges(), {}),  # idle at first
        (WORKING, {"requests_finished": 2}),  # perhaps idle after the second end
        (WORKING, {"decode_requests": 0}),  # prompts, with pauses in between
        (WORKING, {"steps": 0}),  # the time of prompts alone
    ],
)
def test_intervals_with_possible_pauses_say_nothing(gauges, fields):
    clock = BusyClock()
    for _ in range(100):
        clock.note(gauges, counted(0.1, **fields), 1.0)
    assert clock.factor == 1.0


@pytest.mark.parametrize("busy_s", [0.0, 1e-6, 100.0, 1e9])
def test_one_odd_report_changes_little(busy_s):
    odd = [(1.0, 1.0)] * 100 + [(busy_s, 1.0)]
    assert factor_of(odd) == pytest.approx(1.0, rel=0.06)


@given(st.lists(st.tuples(st.sampled_from([0.0, 1e-9, 1.0, 1e12]), st.floats(0.0, 1e6))))
def test_factor_stays_finite(intervals):
    assert 1 / MOST <= factor_of(intervals) <= MOST
