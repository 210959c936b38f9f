"""Few engines are looked after often, many less often, and the sum stays bounded."""

from collections import Counter
from itertools import pairwise

import pytest

from router.publisher.feed.pacing import Pacing


def paced(engines):
    pacing = Pacing()
    pacing.engines = engines
    return pacing


@pytest.mark.parametrize("engines", [1, 100, 500])
def test_an_idle_engine_is_probed_twice_a_second(engines):
    assert paced(engines).probe_interval_s == 0.4


def test_thousand_idle_engines_are_proven_within_a_second():
    assert paced(1_000).probe_interval_s <= 0.8


@pytest.mark.parametrize("engines", [1_000, 10_000])
def test_probes_ticks_and_attempts_are_bounded_together(engines):
    pacing = paced(engines)
    assert engines / pacing.probe_interval_s <= 1_300
    assert engines / pacing.tick_s <= 2_100
    assert engines / pacing.retry_s(99) <= 520


def test_an_engine_that_is_not_there_is_tried_less_and_less_often():
    pacing = paced(1)
    intervals_s = [pacing.retry_s(failures) for failures in range(6)]
    assert intervals_s == sorted(intervals_s)
    assert (intervals_s[0], intervals_s[-1]) == (0.1, 1.0)


@pytest.mark.parametrize("engines", [0, 1, 16, 100, 1_000, 10_000])
def test_few_engines_tick_at_the_same_moment_and_each_in_time(engines):
    pacing = paced(engines)
    now_s = 1234.5678
    due_s = [pacing.next_tick_s(number, now_s) for number in range(engines or 1)]
    assert all(now_s < each <= now_s + pacing.tick_s + 1e-6 for each in due_s)
    at_once = Counter(round(each, 4) for each in due_s)
    assert max(at_once.values()) <= 32
    assert len(at_once) == 1 or engines > 16


def test_from_tick_to_tick_is_an_interval():
    pacing, now_s = paced(40), 50.03
    ticks_s = []
    for _ in range(5):
        now_s = pacing.next_tick_s(2, now_s)
        ticks_s.append(now_s)
    assert [b - a for a, b in pairwise(ticks_s)] == pytest.approx([pacing.tick_s] * 4)
