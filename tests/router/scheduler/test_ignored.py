"""What policies say they use is what they use, and what they do not use is named."""

from random import Random

import numpy as np
import pytest

from router.protocol.requests import ConfigOverride
from router.scheduler.ignored import chosen_by_caller, of_loads, selected_before, users
from router.scheduler.policy.registry import MOST_OVERRIDES, Policies, builtin_policies
from router.scheduler.selector import Policy
from router.scheduler.settings import PolicySettings
from router.sequence import rank_table as ranks
from support.values.terms import candidate, table

OTHERS = {
    "prefill_load_scale": 3.0,
    "router_temperature": 0.5,
    "overlap_score_credit": 0.25,
    "overlap_score_credit_decay": 2.0,
    "decode_active_request_weight": 5.0,
    "host_cache_hit_weight": 0.1,
    "disk_cache_hit_weight": 0.9,
    "shared_cache_multiplier": 0.8,
    "track_prefill_tokens": False,
    "delay_weight": 2.0,
}
RATES = {ranks.BASE_S: 0.02, ranks.PREFILL_S: 1e-4, ranks.CONTEXT_S: 2e-9, ranks.KV_S: 2e-8}


def rows(trust_weight=1.0):
    """Four ranks that differ in everything."""
    made = []
    for i in range(1, 5):
        row = candidate(
            (i, i + 1, i + 3, i + 4), cached=i, prefill_tokens=70 * i, decode_blocks=9 - i,
            requests=i, held=3 * i, capacity=500, new_blocks=10 - i,
        )  # fmt: skip
        for column, value in RATES.items():
            row[column] = value * i
        row[ranks.TRUST_WEIGHT] = trust_weight
        made.append(row)
    return made


def outcome(name, trust_weight=1.0, **settings):
    """The costs and the chances of each candidate, under a new policy of that name."""
    (policy,) = [each for each in builtin_policies() if each.name == name]
    made = PolicySettings(**settings)
    choice = policy.choose(table(*rows(trust_weight)), made, Random(1))
    return np.concatenate([choice.costs, policy.explain(choice, made).chances])


@pytest.mark.parametrize("field", [*OTHERS, "trust_weights"])
@pytest.mark.parametrize("policy", builtin_policies(), ids=lambda policy: policy.name)
def test_policy_depends_on_exactly_the_settings_it_declares(policy, field):
    changed = {"trust_weight": 0.5} if field == "trust_weights" else {field: OTHERS[field]}
    is_used = not np.array_equal(outcome(policy.name), outcome(policy.name, **changed))
    assert is_used == (field in policy.uses)


def test_every_setting_is_covered_and_used_by_a_policy():
    assert {*OTHERS, "trust_weights"} == set(PolicySettings.__struct_fields__)
    assert all(users(field, builtin_policies()) for field in PolicySettings.__struct_fields__)


WEIGHT_0, WEIGHT_2 = {"overlap_score_weight": 0}, {"overlap_score_weight": 2}


class Quiet(Policy):
    name = "quiet"


class Declared(Policy):
    name = "declared"
    uses = ("overlap_score_credit",)


def ignored(policy, /, is_booked=True, **fields):
    policies = Policies([*builtin_policies(), Quiet(), Declared()], "random")
    return policies.ignored(policy, ConfigOverride(**fields), is_booked=is_booked)


def test_sentence_names_field_value_policy_and_those_that_use_it():
    assert ignored("predictive", prefill_load_scale=4.0) == {
        "prefill_load_scale": "router_config_override.prefill_load_scale = 4 has no effect: the "
        "policy `predictive` does not use it; `dynamo-1.0` and `dynamo-1.6` do"
    }


@pytest.mark.parametrize(
    ("policy", "fields", "expected"),
    [
        ("predictive", {"router_temperature": 0.5, "shared_cache_multiplier": 0.5}, set()),
        ("predictive", {"policy": "predictive", "assume_kv_reuse": False}, set()),
        ("predictive", {"overlap_score_weight": 2.0}, {"overlap_score_weight"}),
        ("random", {"router_temperature": 0.5}, {"router_temperature"}),
        ("dynamo-1.0", {"overlap_score_weight": 0.0}, set()),
        ("dynamo-1.0", {"overlap_score_credit": 0.5}, {"overlap_score_credit"}),
        # The older name wins, and 0 turns credits off.
        ("dynamo-1.6", {**WEIGHT_2, "prefill_load_scale": 3}, {"prefill_load_scale"}),
        ("dynamo-1.6", {**WEIGHT_0, "overlap_score_credit": 1}, {"overlap_score_credit"}),
        ("declared", {"overlap_score_weight": 0.0}, set()),
        ("declared", {"overlap_score_weight": 1.0}, {"overlap_score_weight"}),
        ("quiet", {"overlap_score_weight": 1.0, "router_temperature": 1.0}, set()),
    ],
)  # fmt: skip
def test_fields_without_effect_are_named(policy, fields, expected):
    assert set(ignored(policy, **fields)) == expected


def test_many_different_overrides_are_each_answered_for_themselves():
    policies = Policies(builtin_policies(), "predictive")
    for _ in range(2):
        for scale in range(MOST_OVERRIDES + 10):
            override = ConfigOverride(prefill_load_scale=float(scale))
            (sentence,) = policies.ignored("predictive", override, is_booked=True).values()
            assert f"prefill_load_scale = {scale} has no effect" in sentence


def test_tracking_of_a_prompt_counts_only_if_it_is_booked_or_the_policy_uses_it():
    asked = {"track_prefill_tokens": False}
    assert ignored("predictive", **asked) == {}
    assert set(ignored("predictive", is_booked=False, **asked)) == {"track_prefill_tokens"}
    assert ignored("dynamo-1.6", is_booked=False, **asked) == {}


def test_without_a_policy_only_what_counts_as_load_has_an_effect():
    override = ConfigOverride(policy="random", assume_kv_reuse=True, track_prefill_tokens=False)
    for found in (chosen_by_caller(override), of_loads(override)):
        assert set(found) == {"policy"}
        assert "router_config_override.policy = random has no effect" in found["policy"]
    assert set(selected_before(override)) == {"policy", "assume_kv_reuse", "track_prefill_tokens"}
