"""Why a choice came out as it did: what costs are the sum of, and how likely each candidate was."""

from collections import Counter
from random import Random

import pytest

from router.scheduler.policy.registry import builtin_policies
from router.scheduler.settings import PolicySettings
from router.sequence.rank_table import (
    BASE_S,
    BURSTS,
    DECODE_SIDE,
    PLACED_AT,
    RELATIVE_ERROR,
    SLOW_UNTIL_S,
)
from support.values.terms import candidate, table

POLICIES = {policy.name: type(policy) for policy in builtin_policies()}
SETTINGS = {
    "default": PolicySettings(),
    "other": PolicySettings(
        prefill_load_scale=2.0, overlap_score_credit_decay=0.5, decode_active_request_weight=1.5
    ),
    "decoding": PolicySettings(track_prefill_tokens=False, overlap_score_credit=0.5),
    "warm": PolicySettings(router_temperature=0.7),
}


def mixed():
    """Candidates of all kinds: tainted, new, decoding only, with and without load."""
    rows = [
        candidate((4, 6, 8), prefill_tokens=480, decode_blocks=30, new_blocks=6, requests=3,
                  taint=0.6),
        candidate(2, decode_blocks=9, new_blocks=8, requests=2, foreign_requests=2, held=40),
        candidate((0, 3), prefill_tokens=64, decode_blocks=9, requests=1, held=7, taint=1.4),
        candidate(10, prefill_tokens=900, foreign_tokens=100, decode_blocks=60, requests=9),
    ]  # fmt: skip
    of = table(*rows)
    of.values[:, BASE_S : BASE_S + 5] = (0.02, 1e-4, 2e-9, 2e-4, 2e-8)
    of.values[1, SLOW_UNTIL_S] = 15.0
    of.values[:, RELATIVE_ERROR] = 0.1
    of.values[:, PLACED_AT] = (30, 1, 29, 0, 25)[: len(of)]
    of.values[:, BURSTS] = (0, 2, 0, 9, 1)[: len(of)]
    of.values[3, DECODE_SIDE] = 1.0
    return of


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_parts_sum_to_the_cost_that_is_shown(policy, settings):
    policy = policy()
    choice = policy.choose(mixed(), settings, Random(1))
    reasons = policy.explain(choice, settings)
    for index, cost in enumerate(choice.costs.tolist()):
        assert sum(reasons.named([index])[0].values()) == pytest.approx(cost, rel=1e-12, abs=1e-12)


def equals():
    """Two of the three cost the same under every policy."""
    return table(candidate(decode_blocks=5), candidate(), candidate())


@pytest.mark.parametrize("of", [mixed, equals])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_chances_are_how_often_each_is_chosen(policy, settings, of):
    rng, draws, of = Random(4), 2_000, of()
    chosen = Counter(policy().choose(of, settings, rng).index for _ in range(draws))
    choice = policy().choose(of, settings, rng)
    chances = policy().explain(choice, settings).chances
    assert chances.sum() == pytest.approx(1.0)
    for index, chance in enumerate(chances.tolist()):
        assert chosen[index] / draws == pytest.approx(chance, abs=0.05)


def test_parts_are_named_where_they_are_something():
    policy = POLICIES["dynamo-1.0"]()
    choice = policy.choose(
        table(candidate(decode_blocks=6, taint=0.5)), PolicySettings(), Random(1)
    )
    reasons = policy.explain(choice, PolicySettings())
    assert reasons.named([0])[0] == {
        "prefill_blocks": 10.0,
        "decode_blocks": 6.0,
        "preference": -8.0,
    }


def test_a_policy_that_turns_says_how_many_turns_each_waits():
    policy = POLICIES["round-robin"]()
    choice = policy.choose(table(candidate(), candidate()), PolicySettings(), Random(1))
    reasons = policy.explain(choice, PolicySettings())
    assert [reasons.named([i])[0] for i in (0, 1)] == [{"cost": 0.0}, {"cost": 1.0}]
    assert reasons.chances.tolist() == [1.0, 0.0]
