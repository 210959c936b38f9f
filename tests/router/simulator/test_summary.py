import numpy as np
import pytest

from router.simulator import summary
from router.simulator.simulation import simulate
from support.fleets.simulator_worlds import make_core, scenario, small_trace


@pytest.fixture(scope="module")
def outcomes():
    return simulate(small_trace(), scenario(), make_core())


def test_a_distribution_rises_from_the_least_to_the_most():
    values, fractions = summary.distribution(np.array([3.0, 1.0, np.nan, 2.0]))
    assert (values[0], values[-1]) == (1, 3)
    assert (fractions[0], fractions[-1]) == (0, 1)
    assert len(summary.distribution(np.array([np.nan]))[0]) == 0


def test_longer_gaps_fall_from_all_tokens_to_none(outcomes):
    gaps_s, longer = summary.longer_gaps(outcomes)
    assert longer[0] == 1
    assert np.all(np.diff(longer) <= 0)
    assert longer[-1] > 0
    assert np.average(outcomes.tpot_s[~np.isnan(outcomes.tpot_s)]) > gaps_s[0]


def test_values_over_time_are_summarised(outcomes):
    ends_s, hit_rates = summary.hit_rate_over_time(outcomes)
    assert ends_s[-1] == pytest.approx(outcomes.arrivals_s[-1])
    assert np.all((hit_rates >= 0) & (hit_rates <= 1))
    sampled_s, spreads = summary.load_spread_over_time(outcomes)
    assert sampled_s[-1] <= outcomes.arrivals_s[-1]
    assert np.all(spreads >= 0)
    _, ttft_s = summary.ttft_over_time(outcomes)
    assert np.nanmin(outcomes.ttft_s) <= ttft_s.min() <= ttft_s.max() <= np.nanmax(outcomes.ttft_s)
