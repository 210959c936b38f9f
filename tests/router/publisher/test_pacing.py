"""Few engines are looked after often, many less often, and the sum stays bounded."""

import pytest

from router.publisher.pacing import Pacing


def paced(engines):
    pacing = Pacing()
    pacing.engines = engines
    return pacing


@pytest.mark.parametrize("engines", [1, 100, 500])
def test_an_idle_engine_is_probed_twice_a_second(engines):
    assert paced(engines).probe_interval_s == 0.4


def test_a_thousand_idle_engines_are_still_proven_within_a_second():
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
