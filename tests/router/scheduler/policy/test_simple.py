"""Policies without caches."""

from collections import Counter
from random import Random

import pytest

from router.protocol.values import Scope
from router.scheduler.policy.simple import MAX_SCOPES, LeastLoaded, PowerOfTwo, RoundRobin, Uniform
from router.scheduler.settings import PolicySettings
from support.values.terms import candidate, table

COLD, WARM = PolicySettings(), PolicySettings(router_temperature=1.0)


def workers(policy, *tables, settings=COLD, seed=2):
    rng = Random(seed)
    choices = [policy.choose(each, settings, rng) for each in tables]
    return [choice.chosen.rank.worker_id for choice in choices]


def test_round_robin_takes_turns():
    three = table(candidate(), candidate(), candidate())
    assert workers(RoundRobin(), *[three] * 7) == [1, 2, 3, 1, 2, 3, 1]


def test_round_robin_costs_are_turns_to_wait():
    policy, three = RoundRobin(), table(candidate(), candidate(), candidate())
    assert policy.choose(three, COLD, Random(0)).costs.tolist() == [0, 1, 2]
    assert policy.choose(three, COLD, Random(0)).costs.tolist() == [2, 0, 1]


def test_round_robin_continues_after_the_last_rank_as_workers_change():
    def these(*worker_ids):
        return table(*[candidate() for _ in worker_ids], worker_ids=worker_ids)

    tables = [these(1, 2, 4), these(1, 2, 4), these(1, 4), these(1, 4), these(1, 3, 4), these(2, 3)]
    assert workers(RoundRobin(), *tables) == [1, 2, 4, 1, 3, 2]


def test_round_robin_turns_each_scope_by_itself():
    one = table(candidate(), candidate(), scope=Scope("a"))
    two = table(candidate(), candidate(), scope=Scope("b"))
    assert workers(RoundRobin(), one, two, one, two, one) == [1, 1, 2, 2, 1]


def test_round_robin_rotations_are_bounded():
    policy = RoundRobin()
    scopes = [table(candidate(), candidate(), scope=Scope(str(i))) for i in range(MAX_SCOPES + 1)]
    workers(policy, *scopes)
    assert workers(policy, scopes[-1], scopes[1], scopes[0]) == [2, 2, 1]


def test_temperature_loosens_the_rotation():
    three = table(candidate(), candidate(), candidate())
    turns = workers(RoundRobin(), *[three] * 300, settings=WARM)
    assert turns != [1, 2, 3] * 100
    assert min(Counter(turns).values()) > 60


@pytest.mark.parametrize("settings", [COLD, WARM])
def test_random_draws_evenly(settings):
    busy = table(candidate(requests=9, held=9), candidate(), candidate())
    counts = Counter(workers(Uniform(), *[busy] * 3000, settings=settings))
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_least_loaded_counts_foreign_requests():
    of = table(candidate(requests=3), candidate(requests=1, foreign_requests=1), candidate(2))
    assert LeastLoaded().score(of, COLD).tolist() == [3, 2, 0]
    assert workers(LeastLoaded(), of) == [3]


def test_least_loaded_draws_among_equals():
    of = table(candidate(requests=1, held=9), candidate(requests=1), candidate(requests=2))
    counts = Counter(workers(LeastLoaded(), *[of] * 2000))
    assert counts.keys() == {1, 2}
    assert abs(counts[1] - 1000) < 120


def test_power_of_two_takes_the_less_loaded_of_any_two():
    """Of the three pairs, worker 1 wins two, worker 2 one, and worker 3 none."""
    of = table(candidate(requests=1), candidate(requests=2), candidate(requests=3))
    counts = Counter(workers(PowerOfTwo(), *[of] * 3000))
    assert counts.keys() == {1, 2}
    assert abs(counts[1] - 2000) < 150


def test_power_of_two_takes_equals_evenly():
    counts = Counter(workers(PowerOfTwo(), *[table(*[candidate()] * 4)] * 4000))
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_power_of_two_by_temperature_lets_the_busier_one_win_at_times():
    of = table(candidate(), candidate(requests=5))
    counts = Counter(workers(PowerOfTwo(), *[of] * 4000, settings=WARM))
    assert counts[2] / 4000 == pytest.approx(0.269, abs=0.03)  # exp(-1) / (1 + exp(-1))


@pytest.mark.parametrize("policy", [RoundRobin(), Uniform(), LeastLoaded(), PowerOfTwo()])
def test_one_candidate_is_chosen(policy):
    assert workers(policy, table(candidate(requests=7))) == [1]


@pytest.mark.parametrize("make", [RoundRobin, Uniform, LeastLoaded, PowerOfTwo])
def test_the_same_seed_chooses_the_same(make):
    of = table(*[candidate() for _ in range(5)])
    assert workers(make(), *[of] * 40) == workers(make(), *[of] * 40)
