"""What was counted between two reports, whatever happened in between."""

import math

import numpy as np
import pytest

from router.protocol.loads import LoadCounters, LoadGauges
from router.scheduler.predictor.rank_model import (
    counted_since,
    is_new_life,
    is_sane,
    measured_busy_s,
)
from router.scheduler.predictor.rates import NOMINAL_S
from router.scheduler.predictor.shared_model import SharedModel
from support.values.builders import report

BEFORE = LoadCounters(steps=100, busy_s=10.0, prefill_tokens=5_000, requests_received=7)
AFTER = LoadCounters(steps=150, busy_s=12.0, prefill_tokens=6_000, requests_received=9)
AT_WORK, IDLE = LoadGauges(waiting_requests=1), LoadGauges()


def test_counted_work_is_the_difference_of_reports():
    counted = counted_since(report(1, counters=BEFORE), report(1, counters=AFTER))
    assert counted == LoadCounters(steps=50, busy_s=2.0, prefill_tokens=1_000, requests_received=2)


def test_first_report_counts_from_zero():
    assert counted_since(None, report(1, counters=AFTER)) == AFTER


@pytest.mark.parametrize("field", ["steps", "prefill_tokens", "busy_s"])
def test_counters_that_fall_begin_anew(field):
    fallen = LoadCounters(**{"steps": 200, "prefill_tokens": 9_000, "busy_s": 20.0, field: 1})
    before, after = report(1, counters=BEFORE), report(1, counters=fallen)
    assert is_new_life(before, after)
    assert counted_since(before, after) == fallen


def test_another_agent_begins_anew():
    before, after = report(1, counters=BEFORE), report(1, counters=AFTER, incarnation=2)
    assert counted_since(before, after) == AFTER


def test_falling_counters_are_not_negative_work():
    fewer = LoadCounters(steps=150, busy_s=12.0, prefill_tokens=6_000, requests_received=6)
    counted = counted_since(report(1, counters=BEFORE), report(1, counters=fewer))
    assert counted.steps == 50
    assert counted.requests_received == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("field", ["busy_s", "prefill_token_contexts"])
def test_impossible_counters_are_not_sane(field, value):
    assert not is_sane(LoadCounters(**{field: value}))
    assert is_sane(LoadCounters(**{field: 1.0}))
    assert not is_sane(LoadCounters(steps=2**70))


def busy(before_gauges, after_gauges, busy_s=0.0):
    before = report(1, counters=LoadCounters(steps=1), gauges=before_gauges)
    after = report(1, counters=LoadCounters(steps=5, busy_s=busy_s), gauges=after_gauges)
    return measured_busy_s(before, after, counted_since(before, after), 1.1)


def test_an_engine_says_how_long_it_was_busy():
    assert busy(IDLE, IDLE, busy_s=0.7) == 0.7


def test_without_busy_counter_busy_time_is_time_with_work():
    assert busy(AT_WORK, AT_WORK) == 1.1
    assert busy(IDLE, AT_WORK) is None
    assert busy(AT_WORK, IDLE) is None


def test_busy_time_before_the_first_report_is_unknown():
    after = report(1, counters=LoadCounters(steps=5), gauges=AT_WORK)
    assert measured_busy_s(None, after, after.counters, 1.1) is None


@pytest.mark.parametrize("apart_s", [0.25, 10.0])
@pytest.mark.parametrize("times", [0.0, 0.001, 0.2, 5.0, 100.0, 1e6])
def test_three_odd_requests_teach_their_model_nothing(times, apart_s):
    model, work = SharedModel(0.0), NOMINAL_S * np.array([10.0, 4_000.0, 2e7, 100.0, 1e6])

    def predicted_s():
        return model.rates.seconds @ (work / NOMINAL_S)

    for number in range(30):
        model.learn(work, float(work.sum()), number * apart_s)
    before_s = predicted_s()
    for number in range(30, 33):
        model.learn(work, float(work.sum()) * times, number * apart_s)
    assert predicted_s() == pytest.approx(before_s, rel=0.01)
    model.learn(work, float(work.sum()) * times, 33 * apart_s)  # a fourth one is no outlier
    assert predicted_s() != pytest.approx(before_s, rel=0.5)
