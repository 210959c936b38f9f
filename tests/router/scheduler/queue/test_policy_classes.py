"""Which class a request is of, and profiles that make no sense."""

from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConfigError
from router.scheduler._busy_kernel import UNKNOWN_STEP_TOKENS
from router.scheduler.queue.policy_classes import Classes, PolicyClass, PolicyProfile, single_class
from router.sequence.rank_table import MAX_BATCHED_TOKENS, QUEUED_TOKENS, RANK_COLUMNS


def profile(**changes):
    """Two families × two buckets, and a class that stands alone."""
    plain = {
        "default_policy_family": "standard",
        "uncached_isl_buckets": [
            {"min_tokens": 0, "bucket": "short"},
            {"min_tokens": 1000, "bucket": "long"},
        ],
        "policy_classes": [
            {"name": f"{family}_{bucket}", "policy_family": family, "cache_bucket": bucket}
            for family in ("standard", "premium")
            for bucket in ("short", "long")
        ]
        + [{"name": "agents", "queue_policy": "deadline", "quantum": 7}],
    }
    return msgspec.convert({**plain, **changes}, PolicyProfile)


def named(asked, uncached_tokens):
    classes = Classes.of(profile())
    return classes.all[classes.index(asked, uncached_tokens)].name


def test_a_class_is_a_family_and_a_bucket_of_uncached_tokens():
    assert named("premium", 0) == "premium_short"
    assert named("premium", 999) == "premium_short"
    assert named("premium", 1000) == "premium_long"
    assert named("premium", 10**9) == "premium_long"


@pytest.mark.parametrize("asked", [None, "", "unknown", "premium_long", "default"])
def test_request_without_a_family_gets_the_default_one(asked):
    assert named(asked, 5000) == "standard_long"


def test_a_class_that_stands_alone_is_named_itself_whatever_is_cached():
    assert {named("agents", tokens) for tokens in (0, 10**6)} == {"agents"}
    classes = Classes.of(profile())
    assert classes.all[classes.certain("agents")].name == "agents"
    assert classes.certain("premium") is None


def test_without_a_profile_there_is_one_class():
    classes = single_class(1.5, "wspt")
    assert {classes.index(asked, 10) for asked in (None, "x")} == {0}
    assert classes.certain("x") == 0
    assert classes.all[0].is_queueing
    assert not single_class(None, "fcfs").all[0].is_queueing


@pytest.mark.parametrize(
    ("thresholds", "busy"),
    [
        ({}, []),
        ({"prefill_busy_threshold": 1000}, [2, 3]),
        ({"prefill_busy_threshold_frac": 0.5}, [1, 3]),
        ({"prefill_busy_threshold": 1000, "prefill_busy_threshold_frac": 0.5}, [1, 2, 3]),
        ({"prefill_busy_threshold": 0}, [1, 2, 3]),
    ],
)
def test_busy_is_above_either_threshold(thresholds, busy):
    tokens, batched = [0.0, 1000.0, 1001.0, 4097.0], [1.0, 100, 8192, 8192]
    settings = PolicyClass(name="a", **thresholds)
    for part in (1.0, 0.5):
        rows = np.zeros((4, RANK_COLUMNS))
        rows[:, QUEUED_TOKENS], rows[:, MAX_BATCHED_TOKENS] = np.array(tokens) * part, batched
        slots = np.arange(4)
        alone = [settings.has_room(rows, slots[i : i + 1], part) for i in range(4)]
        assert [i for i in range(4) if not alone[i]] == busy
        assert settings.has_room(rows, slots, part)
        assert settings.has_room(rows, slots[1:], part) == any(alone[1:])
    assert not settings.has_room(rows, slots[:0])


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=4),
    st.none() | st.integers(0, 40),
    st.none() | st.floats(0, 8),
    st.floats(0.1, 1),
)
def test_there_is_room_where_a_rank_is_not_above_the_lower_threshold(ranks, tokens, steps, part):
    rows = np.zeros((len(ranks), RANK_COLUMNS))
    for row, (queued, batched) in zip(rows, ranks, strict=True):
        row[QUEUED_TOKENS], row[MAX_BATCHED_TOKENS] = queued, batched

    def limit(batched):
        of_steps = inf if steps is None else steps * (batched or UNKNOWN_STEP_TOKENS)
        return min(inf if tokens is None else tokens, of_steps)

    settings = PolicyClass(
        name="a", prefill_busy_threshold=tokens, prefill_busy_threshold_frac=steps
    )
    assert settings.has_room(rows, np.arange(len(rows)), part) == any(
        queued / part <= limit(batched) for queued, batched in ranks
    )


def orders(policy, requests):
    """Names in order of service; a request is (name, now, jump, uncached, expires)."""
    settings = PolicyClass(name="a", queue_policy=policy)
    return "".join(name for name, *terms in sorted(requests, key=lambda r: settings.order(*r[1:])))


def test_queue_orders_are_as_configured():
    requests = [("a", 1.0, 0.0, 500, 90.0), ("b", 2.0, 0.0, 10, 80.0), ("c", 3.0, 0.0, 900, 70.0)]
    assert orders("fcfs", requests) == "abc"
    assert orders("lcfs", requests) == "cba"
    assert orders("wspt", requests) == "bac"
    assert orders("deadline", requests) == "cba"


def test_a_jump_counts_in_seconds_or_as_weight():
    requests = [("a", 1.0, 0.0, 500, 90.0), ("b", 2.0, 1.5, 500, 90.0), ("c", 2.0, 0.5, 500, 90.0)]
    assert orders("fcfs", requests) == "bac"
    assert orders("lcfs", requests) == "bca"
    assert orders("wspt", requests) == "bca"
    assert orders("deadline", requests) == "bca"
    assert PolicyClass(name="a", queue_policy="wspt").order(0.0, 1.0, 0, 9.0) == -2.0


def cell(**changes):
    return {"name": "x", "policy_family": "standard", "cache_bucket": "short", **changes}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"default_policy_family": "gold"}, "default_policy_family", "no family 'gold'"),
        ({"uncached_isl_buckets": []}, "uncached_isl_buckets", "no bucket begins at 0"),
        (
            {"uncached_isl_buckets": [{"min_tokens": 1, "bucket": "all"}]},
            "uncached_isl_buckets",
            "no bucket begins at 0",
        ),
        (
            {"uncached_isl_buckets": [{"min_tokens": 0, "bucket": x} for x in ("short", "long")]},
            "uncached_isl_buckets",
            "each above the one before",
        ),
        (
            {"uncached_isl_buckets": [{"min_tokens": x, "bucket": "a"} for x in (0, 9)]},
            "uncached_isl_buckets",
            "a name twice",
        ),
        ({"policy_classes": [cell(), cell()]}, r"policy_classes\[1\].name", "'x' twice"),
        ({"policy_classes": [cell(cache_bucket=None)]}, r"policy_classes\[0\]", "only one of"),
        ({"policy_classes": [cell(cache_bucket="huge")]}, r"\[0\].cache_bucket", "no bucket"),
        ({"policy_classes": [cell(), cell(name="y")]}, r"\[1\].cache_bucket", "two classes for"),
        ({"policy_classes": [cell()]}, "policy_classes", "no class for long"),
        (
            {
                "policy_classes": [
                    cell(),
                    cell(name="y", cache_bucket="long"),
                    {"name": "standard"},
                ]
            },
            "policy_classes",
            "is also a family",
        ),
    ],
)
def test_profiles_that_make_no_sense_are_refused_with_their_key(changes, key, words):
    with pytest.raises(ConfigError, match=f"^models.m.*{key}.*{words}"):
        Classes.of(profile(**changes), "models.m.")


@pytest.mark.parametrize(
    "fields", [{"quantum": 0}, {"name": "a b"}, {"queue_policy": "fifo"}, {"x": 1}]
)
def test_fields_have_limits_and_no_others_are_known(fields):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "a", **fields}, PolicyClass)
