"""SGLang's thresholds and LMetric's product, by hand."""

from collections import Counter
from random import Random

import pytest

from router.scheduler.policy.cache_aware import CacheAware, LMetric
from router.scheduler.settings import PolicySettings
from support.values.terms import candidate, table


def decide(*rows, policy=None, isl_tokens=160, **settings):
    """The worker and all costs."""
    policy = CacheAware() if policy is None else policy
    of = table(*rows, isl_tokens=isl_tokens)
    choice = policy.choose(of, PolicySettings(**settings), Random(1))
    return choice.chosen.rank.worker_id, choice.costs.tolist()


def test_follows_the_best_match_while_load_is_even():
    """6 of 10 blocks match, 4 are to compute; 64 requests more are not yet too many."""
    assert decide(candidate(6, requests=64), candidate(3), candidate()) == (1, [0.4, 0.7, 1.0])


def test_a_match_of_the_threshold_is_not_good_enough():
    rows = [candidate(3, requests=2), candidate(requests=1)]
    assert decide(*rows) == (2, [2, 1])
    assert decide(*rows, policy=CacheAware(cache_threshold=0.29)) == (1, [0.7, 1.0])


def test_load_is_uneven_beyond_both_thresholds():
    cached = candidate(9, requests=165)
    assert decide(cached, candidate(requests=101)) == (1, [pytest.approx(0.1), 1.0])  # 64 more
    assert decide(cached, candidate(requests=100)) == (2, [165, 100])  # 65 more, 1.65 times
    many = candidate(9, requests=300)
    assert decide(many, candidate(requests=200))[0] == 1  # 100 more, 1.5 times
    assert decide(many, candidate(requests=199))[0] == 2  # 101 more, 1.507 times


def test_requests_of_others_are_load():
    assert decide(candidate(9, requests=35, foreign_requests=35), candidate()) == (2, [70, 0])


def test_equal_matches_go_to_fewer_requests_then_to_the_smaller_cache():
    rows = [candidate(6, requests=4), candidate(6, requests=2, held=9), candidate(6, requests=2)]
    assert decide(*rows) == (3, [0.4] * 3)
    assert decide(*rows[:2]) == (2, [0.4] * 2)


def test_without_a_match_equal_loads_go_to_the_smaller_cache():
    assert decide(candidate(1, held=9), candidate(held=3), candidate(held=5)) == (2, [0, 0, 0])


def test_equals_in_everything_are_drawn_from():
    of, policy, rng = table(candidate(6), candidate(6)), CacheAware(), Random(1)
    counts = Counter(policy.choose(of, PolicySettings(), rng).index for _ in range(2000))
    assert abs(counts[0] - 1000) < 120


def test_overlap_beyond_the_prompt_is_a_whole_match():
    assert decide(candidate(99), candidate(), isl_tokens=10) == (1, [0, 1])


def test_a_prompt_without_tokens_matches_nothing():
    assert decide(candidate(requests=1), candidate(), isl_tokens=0) == (2, [1, 0])


def test_temperature_draws_from_the_costs():
    of, policy, rng = table(candidate(8), candidate()), CacheAware(), Random(1)
    warm = PolicySettings(router_temperature=1.0)
    counts = Counter(policy.choose(of, warm, rng).index for _ in range(4000))
    assert counts[1] / 4000 == pytest.approx(0.269, abs=0.03)  # exp(-1) / (1 + exp(-1))


def test_preferred_taints_multiply_the_cost():
    assert decide(candidate(6, taint=2.0), candidate(5, taint=0.5)) == (2, [0.8, 0.25])


@pytest.mark.parametrize(
    ("row", "cost"),
    [
        (candidate(), 160 * 1),
        (candidate(6, requests=3), 64 * 4),
        (candidate(6, prefill_tokens=100, requests=3), 164 * 4),
        (candidate(6, foreign_tokens=36, foreign_requests=2, requests=1), 100 * 4),
        (candidate(10, requests=3), 0),
        (candidate(taint=0.5), 80),
    ],
)
def test_lmetric_multiplies_prefill_tokens_with_the_batch(row, cost):
    assert decide(row, policy=LMetric()) == (1, [cost])


def test_lmetric_takes_the_lowest_product():
    """160 · 2 against 32 · 9: the longer queue of a cached prefix is worth it, until it is not."""
    idle = candidate(requests=1)
    assert decide(idle, candidate(8, requests=8), policy=LMetric())[0] == 2
    assert decide(idle, candidate(8, requests=10), policy=LMetric())[0] == 1
