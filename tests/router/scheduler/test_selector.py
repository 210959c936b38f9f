"""From costs to a choice, with the anchor's rules for ties and temperature."""

from collections import Counter
from math import exp
from random import Random

import pytest

from router.protocol.values import Rank
from router.scheduler.cost import Terms
from router.scheduler.selector import select


def caches(*held_blocks):
    return [Terms(Rank(i, 0), 16, 0, 0, 0, 0, held) for i, held in enumerate(held_blocks)]


def chosen(costs, held, temperature=0.0, draws=2000):
    rng = Random(7)
    return Counter(select(costs, caches(*held), temperature, rng) for _ in range(draws))


def test_takes_the_cheapest():
    assert chosen([3.0, 1.0, 2.0], [0, 9, 0]) == {1: 2000}


def test_among_equal_costs_takes_the_smallest_cache():
    assert chosen([1.0, 1.0, 2.0], [5, 4, 0]) == {1: 2000}


def test_costs_must_be_exactly_equal_to_tie():
    assert chosen([1.0, 1.0 + 1e-12], [9, 0]) == {0: 2000}


def test_among_equals_in_everything_draws_evenly():
    counts = chosen([1.0, 1.0, 1.0], [4, 4, 4], draws=6000)
    assert all(abs(count - 2000) < 200 for count in counts.values())


def test_temperature_draws_by_softmax_of_the_normalised_cost():
    counts = chosen([0.0, 5.0, 10.0], [0, 0, 0], temperature=0.5, draws=20_000)
    weights = [exp(0), exp(-0.5 / 0.5), exp(-1 / 0.5)]
    for index, weight in enumerate(weights):
        assert counts[index] / 20_000 == pytest.approx(weight / sum(weights), abs=0.015)


def test_temperature_draws_evenly_among_equal_costs_whatever_the_caches():
    counts = chosen([2.0, 2.0], [0, 99], temperature=1.0, draws=4000)
    assert abs(counts[0] - 2000) < 200


def test_a_vanishing_temperature_takes_the_cheapest():
    assert chosen([1.0, 2.0], [0, 0], temperature=5e-324) == {0: 2000}


def test_the_same_seed_draws_the_same():
    draws = [
        [select([1.0, 2.0, 3.0], caches(0, 0, 0), 1.0, rng) for _ in range(50)]
        for rng in (Random(3), Random(3))
    ]
    assert draws[0] == draws[1]
