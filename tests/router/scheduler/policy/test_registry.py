"""Policies by name: the default, that of a routing group, and a request's own."""

from random import Random

import pytest

from router.errors import ConfigError, InvalidFieldError
from router.scheduler.policy.registry import Policies, builtin_policies, parsed_groups
from router.scheduler.policy.simple import LeastLoaded
from router.scheduler.settings import PolicySettings
from support.values.terms import candidate, table

ALLOWED = (
    "cache-aware, dynamo-1.0, dynamo-1.6, least-loaded, lmetric, power-of-two, predictive, random, "
    "round-robin"
)


def policies(default="dynamo-1.0", **by_group):
    return Policies(builtin_policies(), default, by_group)


def test_a_requests_own_policy_precedes_its_groups_which_precedes_the_default():
    known = policies(chat="lmetric")
    assert known.find("other", None).name == "dynamo-1.0"
    assert known.find("chat", None).name == "lmetric"
    assert known.find("chat", "random").name == "random"


def test_a_policy_is_one_object_however_it_is_found():
    known = policies("round-robin", chat="round-robin")
    assert known.find("x", None) is known.find("chat", None) is known.find("x", "round-robin")


def test_unknown_policy_error_lists_the_known_ones():
    with pytest.raises(InvalidFieldError) as refused:
        policies().find("default", "fastest")
    error = refused.value
    assert (error.field, error.http_status) == ("router_config_override.policy", 422)
    assert (error.reason, error.allowed) == ("'fastest' is not known", ALLOWED)


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("policy", lambda: policies("fastest")),
        ("group_policies", lambda: policies(chat="fastest")),
    ],
)
def test_a_configured_policy_that_is_unknown_is_refused_at_start(key, make):
    with pytest.raises(ConfigError) as refused:
        make()
    assert (refused.value.key, refused.value.allowed) == (key, ALLOWED)


def test_two_of_a_name_are_refused():
    with pytest.raises(ConfigError, match="two are named 'least-loaded'"):
        Policies([*builtin_policies(), LeastLoaded()], "random")


@pytest.mark.parametrize("policy", builtin_policies(), ids=lambda policy: policy.name)
def test_every_policy_chooses_by_finite_costs_at_every_temperature(policy):
    rows = [candidate(i % 5, requests=i % 3, decode_blocks=i, held=i) for i in range(1, 9)]
    for temperature in (0.0, 0.3):
        settings = PolicySettings(router_temperature=temperature)
        for count in (1, 2, 8):
            of = table(*rows[:count])
            choice = policy.choose(of, settings, Random(count))
            assert (choice.table, choice.policy) == (of, policy.name)
            assert len(choice.costs) == count
            assert abs(choice.costs).max() < 1e6
            assert type(choice.index) is int


def test_groups_are_read_from_text():
    assert parsed_groups("") == {}
    assert parsed_groups("chat=dynamo-1.6, batch = least-loaded") == {
        "chat": "dynamo-1.6",
        "batch": "least-loaded",
    }
    assert parsed_groups("a=b=random") == {"a=b": "random"}


@pytest.mark.parametrize("text", ["chat", "=random", "chat=", " , ", "a=random,a=lmetric"])
def test_invalid_group_list_is_refused(text):
    with pytest.raises(ConfigError, match="group_policies"):
        parsed_groups(text)
