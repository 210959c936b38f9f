"""Policy files: what is read from them, and what is wrong with them."""

import pytest

from router.errors import ConfigError
from router.scheduler.queue.policy_classes import (
    decode_policy_file,
    encode_policy_file,
    queue_policies,
    single_class,
)

TOML = """
default_policy_family = "standard"
uncached_isl_buckets = [{min_tokens = 0, bucket = "short"}, {min_tokens = 4096, bucket = "long"}]

[[policy_classes]]
name = "standard_short"
policy_family = "standard"
cache_bucket = "short"
queue_policy = "wspt"
quantum = 4096
prefill_busy_threshold_frac = 1.0

[[policy_classes]]
name = "standard_long"
policy_family = "standard"
cache_bucket = "long"
quantum = 1024
request_queue_limit_per_worker = 8

[models.small]
default_policy_family = "all"
uncached_isl_buckets = [{min_tokens = 0, bucket = "all"}]
policy_classes = [{name = "all_all", policy_family = "all", cache_bucket = "all"}]
"""
SINGLE = single_class(0.5, "fcfs")


def names(text, model):
    return [each.name for each in queue_policies(text, SINGLE).classes(model).all]


def test_model_has_its_own_profile_or_the_default_one():
    assert names(TOML, "large") == ["standard_short", "standard_long"]
    assert names(TOML, "small") == ["all_all"]
    short, long = queue_policies(TOML, SINGLE).classes("large").all
    assert (short.queue_policy, short.quantum, short.is_queueing) == ("wspt", 4096, True)
    assert (long.request_queue_limit_per_worker, long.is_queueing) == (8, False)


def test_json_says_the_same():
    assert encode_policy_file(decode_policy_file(TOML)).startswith("{")
    again = decode_policy_file(encode_policy_file(decode_policy_file(TOML)))
    assert again == decode_policy_file(TOML)


def test_without_a_profile_there_is_the_single_class():
    assert names("", "any") == ["default"]
    only_one_model = TOML[TOML.index("[models") :]
    assert names(only_one_model, "large") == ["default"]
    assert names(only_one_model, "small") == ["all_all"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "router_policy_config: .*truncated"),
        ("a = ", "router_policy_config: "),
        ("x = 1", "unknown field `x`"),
        ('{"policy_classes": [{"name": "a", "quantum": 0}]}', r"policy_classes\[0\].quantum"),
        ('default_policy_family = "a"', "uncached_isl_buckets: missing beside default_policy"),
        (TOML.replace('family = "all"', 'family = "x"', 1), r"models.small.default_policy_family"),
        (TOML.replace('"standard_long"', '"standard_short"'), r"config: policy_classes\[1\].name"),
    ],
)
def test_invalid_profile_is_refused_with_its_key(text, words):
    with pytest.raises(ConfigError, match=words):
        queue_policies(text, SINGLE)
