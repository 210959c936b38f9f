"""Sliding windows, against the list of everything that arrived."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduler.capacity.arrivals import BUCKETS, REQUESTS, WORK_COLUMNS, Arrivals


def one(requests=1.0):
    work = np.zeros(WORK_COLUMNS)
    work[REQUESTS] = requests
    return work


def requests_per_s(arrivals, now_s):
    work, length_s = arrivals.recent(now_s)
    return work[REQUESTS] / length_s


@pytest.mark.parametrize("now_s", [30.0, 60.0, 61.7, 95.0, 1_000.25])
def test_constant_rate_is_shown_exactly(now_s):
    arrivals = Arrivals(60.0, 0.0)
    for at_s in np.arange(0.0, now_s, 0.25):
        arrivals.add(one(0.25 * 7), at_s)
    assert requests_per_s(arrivals, now_s) == pytest.approx(7, rel=0.02)


@given(st.lists(st.floats(0.01, 30.0), min_size=1, max_size=60))
def test_window_has_what_arrived_within_it(gaps_s):
    arrivals, times_s = Arrivals(60.0, 0.0), np.cumsum(gaps_s)
    for at_s in times_s:
        arrivals.add(one(), at_s)
    now_s = float(times_s[-1])
    found = arrivals.recent(now_s)[0][REQUESTS]
    bucket_s = 60.0 / BUCKETS
    assert found >= (times_s > now_s - 60.0 + bucket_s).sum() - 1e-9
    assert found <= (times_s >= now_s - 60.0 - bucket_s).sum() + 1e-9
    earlier = arrivals.earlier(now_s)
    assert (earlier[:, REQUESTS] <= len(times_s)).all()


def test_work_is_forgotten_exactly_after_six_windows():
    arrivals = Arrivals(60.0, 0.0)
    arrivals.add(one(), 5.0)
    assert arrivals.recent(71.0)[0][REQUESTS] == 0
    assert (
        arrivals.earlier(300.0)[:, REQUESTS].sum() == 0
    )  # its first bucket was not observed whole
    arrivals.add(one(), 400.0)
    assert arrivals.earlier(700.0)[:, REQUESTS].max() == 1
    assert not arrivals.earlier(400.0 + 380.0).any()


def test_first_window_begins_with_the_first_observation():
    arrivals = Arrivals(60.0, 100.0)
    arrivals.add(one(3), 101.0)
    assert arrivals.recent(101.0)[1] == 10.0
    assert arrivals.recent(130.0)[1] == 30.0
    assert not arrivals.is_whole(159.0)
    assert arrivals.is_whole(160.0)
    assert requests_per_s(arrivals, 130.0) == pytest.approx(0.1)
