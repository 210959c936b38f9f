"""Rates are learned from work and seconds, whatever comes with what."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.protocol.loads import LoadCounters
from router.scheduler.predictor._rates_kernel import MOST_RATE_STEP
from router.scheduler.predictor.rates import NOMINAL_S, Noise, Prior, Rates, work_of
from support.chaos.fuzzing import examples
from support.engines.engine_work import LARGE_S, mixed_second

ANYTHING = Prior.around(np.ones(5), common=10.0, each=5.0)
NOISE = Noise(least=0.01, first=0.05, most=0.5)

factors = st.lists(st.floats(0.2, 5), min_size=5, max_size=5)
seeds = st.integers(0, 2**32)


def learned(true_s, random, seconds, noise=0.0, prior=ANYTHING):
    rates = Rates(prior, NOISE)
    for _ in range(seconds):
        teach(rates, mixed_second(random), true_s, random.gauss(1, noise), prior)
    return rates


def teach(rates, counted, true_s, times=1.0, prior=ANYTHING):
    rates.learn(counted * NOMINAL_S, float(counted @ true_s) * times, prior)
    rates.check_invariants()


@settings(max_examples=examples(40))
@given(factors, seeds)
def test_rates_explain_their_samples(multiples, seed):
    random = Random(seed)
    true_s, rates = np.array(multiples) * NOMINAL_S, Rates(ANYTHING, NOISE)
    seen = [mixed_second(random) for _ in range(60)]
    for counted in seen:
        teach(rates, counted, true_s)
    assert sum(seen) @ rates.seconds == pytest.approx(sum(seen) @ true_s, rel=0.05)


def test_every_rate_is_found():
    rates = learned(LARGE_S, Random(1), 200)
    assert rates.seconds == pytest.approx(LARGE_S, rel=0.01)


def test_predicts_under_noise():
    random = Random(1)
    rates = learned(LARGE_S, random, 400, noise=0.1)
    for _ in range(20):
        counted = mixed_second(random)
        assert counted @ rates.seconds == pytest.approx(counted @ LARGE_S, rel=0.1)


def test_uncertainty_follows_noise():
    counted = mixed_second(Random(3)) * NOMINAL_S
    errors = [
        learned(LARGE_S, Random(1), 60, noise).relative_error(counted) for noise in (0.0, 0.3)
    ]
    assert errors[0] < 0.02 < errors[1]


def test_correlated_inputs_keep_their_proportion():
    prior = Prior.around(np.ones(5), common=0.5, each=0.2)
    rates = Rates(prior, NOISE)
    counted = np.array([10.0, 2_000.0, 8e6, 100.0, 1e6])
    for _ in range(30):
        teach(rates, counted, 3 * NOMINAL_S, prior=prior)
    assert counted @ rates.seconds == pytest.approx(3 * counted @ NOMINAL_S, rel=0.01)
    assert rates.seconds / NOMINAL_S == pytest.approx(np.full(5, 3.0), rel=0.15)


@given(st.floats(10, 1_000), seeds)
def test_an_outlier_counts_for_nothing(times, seed):
    random = Random(seed)
    rates = learned(LARGE_S, random, 30)
    before = rates.seconds.copy()
    teach(rates, np.array([20.0, 4_000.0, 2e7, 100.0, 1e6]), LARGE_S, times)
    assert (rates.seconds == before).all()


def test_an_outlier_each_few_seconds_does_not_mislead():
    random = Random(5)
    rates = Rates(ANYTHING, NOISE)
    for second in range(300):
        teach(rates, mixed_second(random), LARGE_S, 5.0 if second % 7 == 6 else 1.0)
    counted = mixed_second(random)
    assert counted @ rates.seconds == pytest.approx(counted @ LARGE_S, rel=0.05)


@pytest.mark.parametrize(("times", "reports"), [(0.3, 2), (2.0, 2), (3.9, 2), (10.0, 3), (60, 4)])
def test_a_change_is_believed_from_the_second_report_on_by_a_factor_of_four_each(times, reports):
    random = Random(7)
    rates = learned(LARGE_S, random, 60)
    counted = np.array([10.0, 4_000.0, 2e7, 100.0, 1e6])
    for _ in range(reports):
        teach(rates, counted, LARGE_S * times)
    assert counted @ rates.seconds == pytest.approx(times * (counted @ LARGE_S), rel=0.05)


@settings(max_examples=examples(60))
@given(factors, seeds, st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_no_report_changes_a_rate_by_more_than_the_stated_factor(multiples, seed, times):
    random, true_s = Random(seed), np.array(multiples) * NOMINAL_S
    rates = learned(true_s, random, random.randint(0, 20))
    for each in times:
        before = rates.seconds
        teach(rates, mixed_second(random), true_s, each)
        change = rates.seconds / before
        assert change.max() <= MOST_RATE_STEP * 1.000001
        assert change.min() >= 0.999999 / MOST_RATE_STEP


def test_rates_return_to_the_prior():
    prior = Prior.around(np.full(5, 2.0), common=0.5, each=0.2)
    rates = learned(LARGE_S, Random(1), 60)
    rates.relax(prior, kept=0.5)
    assert rates.seconds == pytest.approx((2 * NOMINAL_S + LARGE_S) / 2, rel=0.02)
    rates.relax(prior, kept=0.0)
    assert rates.seconds == pytest.approx(2 * NOMINAL_S)
    assert np.diagonal(rates.covariance) == pytest.approx(np.full(5, 4 * (0.5**2 + 0.2**2)))
    assert rates.covariance[0, 1] == pytest.approx(4 * 0.5**2)
    assert rates.relative_error(np.ones(5)) == pytest.approx((0.5**2 + 0.2**2 / 5) ** 0.5)


def test_a_variance_that_rounding_makes_negative_is_none():
    """Two kinds of work that are known together to 1 in 10 ** 16, and hardly each by itself."""
    rates = Rates(ANYTHING, NOISE)
    random = Random(4)
    for exponent in [*range(18), *range(18, 0, -1)]:
        work = np.array([1.0, random.random(), random.random(), 1e-9, 10.0**exponent])
        for _ in range(2):
            rates.learn(work * 10.0**exponent, 10.0 ** random.uniform(0, 18), ANYTHING)
            rates.check_invariants()


def test_no_rate_is_ever_nothing():
    rates = Rates(ANYTHING, NOISE)
    free = np.array([0.0, 1 / 9_000, 0.0, 0.0, 0.0])
    random = Random(2)
    for _ in range(50):
        teach(rates, mixed_second(random) + 1, free)
    assert (rates.seconds > 0).all()


def test_work_is_counted_in_nominal_seconds():
    counters = LoadCounters(
        steps=100,
        prefill_tokens=20_000,
        prefill_token_contexts=1e9,
        decode_requests=10_000,
        resident_kv_tokens=100_000_000,
    )
    assert work_of(counters) == pytest.approx([1.0, 1.0, 1.5, 1.0, 3.0])
