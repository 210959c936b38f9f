"""Settings of placement: which policies use them, in `--help` and in warnings."""

import pytest

from router.config.core import every_policy
from router.config.load import load_router
from router.config.policy import FIELD_OF, USED_BY, PolicyConfig
from router.runtime.process.settings import settings_of
from router.scheduler.ignored import users
from router.scheduler.policy.registry import builtin_policies
from router.scheduler.selector import Policy
from router.scheduler.settings import PolicySettings


class Mine(Policy):
    name = "mine"


def unused(**settings):
    return PolicyConfig(**settings).unused([*builtin_policies(), Mine()])


def test_every_setting_of_placement_says_in_its_help_who_uses_it():
    placing = [each for each in settings_of(PolicyConfig()) if each.name in FIELD_OF]
    assert {each.name for each in placing} == FIELD_OF.keys()
    assert {*FIELD_OF.values(), "track_prefill_tokens"} == set(PolicySettings.__struct_fields__)
    for each in placing:
        declared = users(FIELD_OF[each.name], builtin_policies())
        assert list(USED_BY[each.name]) == declared
        assert each.text.endswith(f"; used by {', '.join(declared)}")


def test_setting_that_no_policy_in_force_uses_is_named_with_those_that_do():
    assert unused(prefill_load_scale=4.0, delay_weight=0.2) == {
        "prefill_load_scale": "prefill_load_scale = 4 has no effect: the policy `predictive` does "
        "not use it; `dynamo-1.0` and `dynamo-1.6` do"
    }
    (sentence,) = unused(delay_weight=1.0, policy="random", group_policies="a=lmetric").values()
    assert sentence.endswith("the policies `random` and `lmetric` do not use it; `predictive` does")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"delay_weight": 1.0},
        {"prefill_load_scale": 4.0, "policy": "dynamo-1.0"},
        {"prefill_load_scale": 4.0, "group_policies": "chat=dynamo-1.6"},
        {"prefill_load_scale": 4.0, "policy": "mine"},
        {"prefill_load_scale": 4.0, "group_policies": "chat=mine"},
        {"overlap_score_weight": 0.0},  # turns the index off
        {"overlap_score_weight": 1.0, "host_cache_hit_weight": 0.75},  # the defaults
    ],
)
def test_setting_that_is_used_or_may_be_is_not_named(settings):
    assert unused(**settings) == {}


def test_show_config_prints_the_warning_beside_the_source(capsys):
    arguments = ["--overlap-score-weight", "2", "--show-config"]
    with pytest.raises(SystemExit):
        load_router(arguments, {"KV_ROUTER_ROUTER_TEMPERATURE": "0.5"}).shown()
    lines = {line.partition(" ")[0]: line for line in capsys.readouterr().out.splitlines()}
    warning = PolicyConfig(overlap_score_weight=2.0).unused(every_policy())["overlap_score_weight"]
    source = "flag: --overlap-score-weight"
    assert lines["overlap_score_weight"] == f"overlap_score_weight = 2.0  # {source}; {warning}"
    assert "no effect" not in lines["router_temperature"]
