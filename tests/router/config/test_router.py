"""What the settings of a router come to."""

import pytest
from msgspec.structs import replace

from router.config.load import load_router_config
from router.config.router import DECISION_SETTINGS, RouterConfig
from router.errors import ConfigError
from router.indexer.approximate import ApproximateLimits
from router.indexer.base import IndexMode
from router.indexer.predictions import NO_ESTIMATES
from router.runtime.process.settings import configured, settings_of
from router.scheduler.settings import DEFAULT_POLICY, PolicySettings

OTHERS = {
    "block_key": "00" * 32,
    "block_key_file": __file__,
    "group_policies": "chat=random",
    "prefill_load_scale": 2.0,
    "router_prefill_load_model": "ais",
    "router_tracking_hash": "keyed-xxh3-v1",
}
"""Where adding one makes no valid value, or the default by another name."""

NOT_RECORDED = (
    *("event_threads", "block_key", "block_key_file"),
    *("capacity_window_s", "capacity_target_saturation"),
)
"""A secret has no place in a recording: a replay sets the same one. Signals decide nothing."""


def core(*arguments):
    return load_router_config(arguments, {}).core


def test_default_index_follows_events_without_estimates():
    assert core().mode is IndexMode.EVENTS
    assert core().estimates.beside_events is None


def test_estimates_may_be_used_beside_events():
    settings = core("--predicted-ttl-s", "2.5")
    assert settings.mode is IndexMode.EVENTS
    assert settings.estimates.beside_events == ApproximateLimits(2.5, 1 << 20, 0.8)


def test_bookings_may_replace_events():
    settings = core("--no-use-kv-events", "--approximate-max-blocks", "2048")
    assert settings.mode is IndexMode.APPROXIMATE
    assert settings.estimates.without_events == ApproximateLimits(120.0, 2048, 0.8)


@pytest.mark.parametrize("others", [(), ("--no-use-kv-events",), ("--predicted-ttl-s", "1")])
def test_without_weight_there_is_no_index(others):
    settings = core("--overlap-score-weight", "0", *others)
    assert (settings.mode, settings.estimates) == (IndexMode.NONE, NO_ESTIMATES)


def test_the_index_is_bounded_and_its_multiplier_secret():
    config = load_router_config(("--index-max-blocks", "5000", "--event-threads", "3"), {})
    assert (config.index_settings.max_blocks, config.index_settings.event_threads) == (5000, 3)
    assert config.index_settings.multiplier % 2 == 1
    assert len({load_router_config((), {}).index_settings.multiplier for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("event_threads", "0"),
        ("event_threads", "65"),
        ("index_max_blocks", "100"),
        ("approximate_ttl_s", "0"),
        ("approximate_prune_target", "1.5"),
        ("predicted_ttl_s", "-1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(ConfigError, match=flag):
        load_router_config((flag, value), {})


def test_trust_weights_can_be_set():
    weights = core("--trust-weight-degraded", "0.25").policy.trust_weights
    assert (weights.lagging, weights.degraded, weights.blind) == (1.0, 0.25, 0.0)


def test_decisions_depend_on_the_settings_that_recordings_have():
    """And on no other but NOT_RECORDED: each is changed in turn, with events and without."""
    for setting in settings_of(RouterConfig()):
        name, other = setting.name, OTHERS.get(setting.name) or _other(setting.value)
        changes = any(
            _decides({"use_kv_events": each, name: other}) != _decides({"use_kv_events": each})
            for each in (True, False)
        )
        assert changes == (name in (*DECISION_SETTINGS, *NOT_RECORDED)), name


def test_settings_reach_their_policies():
    settings = core(
        *("--overlap-score-weight", "2", "--overlap-score-credit", "0.9"),
        *("--overlap-score-credit-decay", "0.1", "--host-cache-hit-weight", "0.2"),
        *("--disk-cache-hit-weight", "0.3", "--shared-cache-multiplier", "0.4"),
        *("--decode-active-request-weight", "5", "--router-temperature", "0.6"),
        *("--delay-weight", "0.7", "--no-router-track-prefill-tokens"),
    )
    assert settings.policy == PolicySettings(
        prefill_load_scale=2.0,
        router_temperature=0.6,
        overlap_score_credit=0.9,
        overlap_score_credit_decay=0.1,
        decode_active_request_weight=5.0,
        host_cache_hit_weight=0.2,
        disk_cache_hit_weight=0.3,
        shared_cache_multiplier=0.4,
        track_prefill_tokens=False,
        delay_weight=0.7,
    )


def test_the_weight_has_a_newer_name():
    assert core("--prefill-load-scale", "3").policy.prefill_load_scale == 3.0


def test_policies_are_named_for_all_and_for_groups():
    settings = core("--policy", "lmetric", "--group-policies", "chat=random,batch=least-loaded")
    assert settings.default_policy == "lmetric"
    assert settings.group_policies == {"chat": "random", "batch": "least-loaded"}
    assert (core().default_policy, core().group_policies) == (DEFAULT_POLICY, {})


def _other(value):
    if value is None:
        return 1
    return not value if isinstance(value, bool) else value + type(value)(1)


def _decides(fields):
    """What a core is made of; its id only names it."""
    config = configured(RouterConfig, **fields)
    return replace(config.core, router_id=0), replace(config.index_settings, multiplier=1)
