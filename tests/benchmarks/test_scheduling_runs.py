"""Replays of the router as it is built, and of one that predicts by other rates."""

import pytest
from scheduling_runs import Case, run

SMALL = {"source": "multi-turn", "policy": "predictive", "requests": 200, "slow_workers": 8}


@pytest.fixture(scope="module")
def learned():
    return run(Case(**SMALL))


@pytest.mark.parametrize("rates", ["shared", "scrambled"])
def test_other_rates_than_learned_decide_otherwise(rates, learned):
    other = run(Case(**SMALL, rates=rates))
    assert other.unserved == learned.unserved == 0
    assert other.ttft_mean_s != learned.ttft_mean_s
