"""From costs to a choice, with the anchor's rules for ties and temperature."""

from collections import Counter
from math import exp
from random import Random

import numpy as np
import pytest

from router.scheduler.selector import pick


def chosen(costs, *tie_breakers, temperature=0.0, draws=2000):
    rng = Random(7)
    costs, tie_breakers = np.array(costs, float), [np.array(keys, float) for keys in tie_breakers]
    return Counter(pick(costs, temperature, rng, *tie_breakers) for _ in range(draws))


def test_takes_the_cheapest():
    assert chosen([3, 1, 2], [0, 9, 0]) == {1: 2000}


def test_among_equal_costs_takes_the_lowest_key():
    assert chosen([1, 1, 2], [5, 4, 0]) == {1: 2000}


def test_among_equal_keys_takes_the_lowest_of_the_next():
    assert chosen([1, 1, 1, 0.5, 0.5], [0, 0, 0, 7, 7], [3, 2, 1, 9, 8]) == {4: 2000}


def test_costs_must_be_exactly_equal_to_tie():
    assert chosen([1.0, 1.0 + 1e-12], [9, 0]) == {0: 2000}


@pytest.mark.parametrize("keys", [(), ([4, 4, 4, 0],), ([4, 4, 4, 0], [1, 1, 1, 0])])
def test_among_equals_in_everything_draws_evenly(keys):
    counts = chosen([1, 1, 1, 2], *keys, draws=6000)
    assert counts.keys() == {0, 1, 2}
    assert all(abs(count - 2000) < 200 for count in counts.values())


def test_without_a_tie_draws_nothing():
    rng = Random(1)
    pick(np.array([2.0, 1.0]), 0.0, rng)
    assert rng.getstate() == Random(1).getstate()


def test_temperature_draws_by_softmax_of_the_normalised_cost():
    counts = chosen([3, 8, 13], temperature=0.5, draws=20_000)
    weights = [exp(0), exp(-0.5 / 0.5), exp(-1 / 0.5)]
    for index, weight in enumerate(weights):
        assert counts[index] / 20_000 == pytest.approx(weight / sum(weights), abs=0.015)


def test_temperature_draws_evenly_among_equal_costs_whatever_the_keys():
    counts = chosen([2, 2], [0, 99], temperature=1.0, draws=4000)
    assert abs(counts[0] - 2000) < 200


def test_a_vanishing_temperature_takes_the_cheapest():
    assert chosen([2, 1], temperature=5e-324) == {1: 2000}


def test_costs_below_zero_are_costs():
    assert chosen([-1, -5, 0]) == {1: 2000}
    assert chosen([-1, -5, 0], temperature=0.01) == {1: 2000}


def test_one_candidate_is_chosen():
    assert chosen([7], temperature=1.0) == chosen([7]) == {0: 2000}


def test_the_same_seed_draws_the_same():
    costs = np.array([1.0, 1.0, 3.0])
    for temperature in (0.0, 1.0):
        one, two = (
            [pick(costs, temperature, rng) for _ in range(50)] for rng in map(Random, (3, 3))
        )
        assert one == two
