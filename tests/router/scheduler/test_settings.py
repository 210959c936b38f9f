"""Settings of policies, and what a request may want of its own."""

import pytest

from router.protocol.replies import TrustState
from router.protocol.requests import ConfigOverride
from router.scheduler.settings import PolicySettings, TrustWeights

CONFIGURED = PolicySettings(prefill_load_scale=2.0, router_temperature=0.1)


def test_unset_override_keeps_the_setting():
    assert CONFIGURED.overridden(None) is CONFIGURED
    assert CONFIGURED.overridden(ConfigOverride()) == CONFIGURED
    assert CONFIGURED.overridden(ConfigOverride(policy="random")) == CONFIGURED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill_load_scale", 3.0),
        ("router_temperature", 0.0),
        ("overlap_score_credit", 0.0),
        ("shared_cache_multiplier", 0.5),
        ("track_prefill_tokens", False),
    ],
)
def test_override_replaces_the_setting(field, value):
    overridden = CONFIGURED.overridden(ConfigOverride(**{field: value}))
    assert getattr(overridden, field) == value
    unchanged = set(PolicySettings.__struct_fields__) - {field}
    assert all(getattr(overridden, name) == getattr(CONFIGURED, name) for name in unchanged)


def test_the_older_name_of_the_scale_precedes_it():
    override = ConfigOverride(overlap_score_weight=4.0, prefill_load_scale=3.0)
    overridden = CONFIGURED.overridden(override)
    assert (overridden.prefill_load_scale, overridden.overlap_score_credit) == (4.0, 1.0)


def test_no_overlap_weight_is_no_credit_either():
    override = ConfigOverride(overlap_score_weight=0.0, overlap_score_credit=0.5)
    overridden = CONFIGURED.overridden(override)
    assert (overridden.prefill_load_scale, overridden.overlap_score_credit) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("state", "weight"),
    [
        (TrustState.EXACT, 1.0),
        (TrustState.LAGGING, 1.0),
        (TrustState.DEGRADED, 0.5),
        (TrustState.BLIND, 0.0),
    ],
)
def test_overlap_counts_by_the_trust_in_it(state, weight):
    assert TrustWeights().weight(state) == weight


def test_trust_weights_can_be_set():
    assert TrustWeights(degraded=0.1).weight(TrustState.DEGRADED) == 0.1
