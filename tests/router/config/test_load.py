"""The router's settings under Dynamo's names, and those that contradict each other."""

import pytest

from router.config.dynamo_aliases import ALIASES, REFUSED
from router.config.load import RULES, changed, load_router, load_router_config
from router.config.openai import OpenAiConfig
from router.config.picker import PickerConfig
from router.config.router import RouterConfig
from router.errors import ConfigError
from router.forward.config import in_router
from router.protocol.values import Scope
from router.runtime.process.loading import Loaded
from router.runtime.process.settings import configured, settings_of
from router.sequence.hashing.keyed_hashes import TrackingKey
from tests.support.values.settings import flat

CONFIG_1_0_2 = {
    "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": ("0.5", {"overlap_score_weight": 0.5}),
    "DYN_ROUTER_TEMPERATURE": ("0.2", {"router_temperature": 0.2}),
    "DYN_ROUTER_USE_KV_EVENTS": ("false", {"use_kv_events": False}),
    "DYN_ROUTER_DURABLE_KV_EVENTS": ("true", {}),
    "DYN_ROUTER_REPLICA_SYNC": ("false", {"router_replica_sync": False}),
    "DYN_ROUTER_QUEUE_THRESHOLD": ("1.5", {"router_queue_threshold": 1.5}),
    "DYN_ROUTER_TRACK_ACTIVE_BLOCKS": ("False", {"router_track_active_blocks": False}),
    "DYN_ROUTER_TRACK_OUTPUT_BLOCKS": ("0", {"router_track_output_blocks": False}),
    "DYN_ROUTER_ASSUME_KV_REUSE": ("false", {"router_assume_kv_reuse": False}),
    "DYN_ROUTER_SNAPSHOT_THRESHOLD": ("1000000", {"snapshot_threshold": 1_000_000}),
    "DYN_ROUTER_RESET_STATES": ("false", {"reset_state": False}),
    "DYN_ROUTER_TTL_SECS": ("60.0", {"approximate_ttl_s": 60.0}),
    "DYN_ROUTER_MAX_TREE_SIZE": ("2048", {"approximate_max_blocks": 2048}),
    "DYN_ROUTER_PRUNE_TARGET_RATIO": ("0.5", {"approximate_prune_target": 0.5}),
    "DYN_ROUTER_EVENT_THREADS": ("4", {"event_threads": 4}),
    "DYN_ROUTER_BLOCK_SIZE": ("32", {"dynamo_block_size": 32}),
    "DYN_KV_CACHE_BLOCK_SIZE": ("64", {"dynamo_block_size": 64}),
    "DYN_ROUTER_ENDPOINT": (
        "dyn://ns.backend.generate",
        {"dynamo_namespace": "ns", "dynamo_component": "backend"},
    ),
}
CONFIG_1_6_1 = {
    "DYN_ROUTER_MODE": ("least_loaded", {"policy": "least-loaded"}),
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": ("0.5", {"overlap_score_credit": 0.5}),
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": ("2", {"overlap_score_credit_decay": 2.0}),
    "DYN_ROUTER_PREFILL_LOAD_SCALE": ("3", {"prefill_load_scale": 3.0}),
    "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": ("4", {"decode_active_request_weight": 4.0}),
    "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT": ("0.6", {"host_cache_hit_weight": 0.6}),
    "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT": ("0.3", {"disk_cache_hit_weight": 0.3}),
    "DYN_SHARED_CACHE_MULTIPLIER": ("0.5", {"shared_cache_multiplier": 0.5}),
    "DYN_ROUTER_APPROXIMATE_CACHE_POLICY": ("ttl", {}),
    "DYN_ROUTER_TRACK_PREFILL_TOKENS": ("false", {"router_track_prefill_tokens": False}),
    "DYN_ROUTER_PREFILL_LOAD_MODEL": ("ais", {"router_prefill_load_model": "ais"}),
    "DYN_ROUTER_PREDICTED_TTL_SECS": ("2", {"predicted_ttl_s": 2.0}),
    "DYN_ROUTER_MIN_INITIAL_WORKERS": ("3", {"min_initial_workers": 3}),
    "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": ("600", {"session_affinity_ttl_s": 600.0}),
    "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": ("30", {"reservation_ttl_s": 30.0}),
    "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": ("0.85", {"active_decode_blocks_threshold": 0.85}),
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": ("9000", {"active_prefill_tokens_threshold": 9000}),
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC": (
        "1.5",
        {"active_prefill_tokens_threshold_frac": 1.5},
    ),
}


@pytest.mark.parametrize("variable", [*CONFIG_1_0_2, *CONFIG_1_6_1])
def test_a_variable_of_dynamo_is_a_setting_of_ours(variable):
    value, settings = {**CONFIG_1_0_2, **CONFIG_1_6_1}[variable]
    assert load_router_config((), {variable: value}) == configured(RouterConfig, **settings)


def test_a_mode_of_a_session_and_an_order_of_a_queue_are_settings_of_ours_too():
    """They contradict what these are by default."""
    both = {
        "DYN_ROUTER_SESSION_AFFINITY_MODE": "soft",
        "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": "9",
        "DYN_ROUTER_QUEUE_POLICY": "wspt",
        "DYN_ROUTER_QUEUE_THRESHOLD": "1",
    }
    config = flat(load_router_config((), both))
    assert (config.session_affinity_mode, config.router_queue_policy) == ("soft", "wspt")


POLICY_FILE = """
default_policy_family = "all"
uncached_isl_buckets = [{min_tokens = 0, bucket = "all"}]
policy_classes = [{name = "all_all", policy_family = "all", cache_bucket = "all"}]
"""


def test_a_policy_file_is_a_setting_of_ours_too(tmp_path):
    file = tmp_path / "classes.toml"
    file.write_text(POLICY_FILE)
    config = flat(load_router_config((), {"DYN_ROUTER_POLICY_CONFIG": str(file)}))
    assert '"name":"all_all"' in config.router_policy_config


def test_bookings_may_be_named_under_dynamos_key(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(bytes(32))
    values = dict(zip(TRACKING, ("keyed-xxh3-v1", str(file), "k1"), strict=True))
    assert load_router_config((), values).naming.tracking == TrackingKey(bytes(32), "k1")


def test_every_dynamo_variable_has_a_test():
    tried = {*CONFIG_1_0_2, *CONFIG_1_6_1, "DYN_ROUTER_POLICY_CONFIG"}
    tried |= {"DYN_ROUTER_SESSION_AFFINITY_MODE", "DYN_ROUTER_QUEUE_POLICY", *TRACKING}
    assert {alias.variable for alias in ALIASES} == tried


def test_every_alias_is_a_setting_and_every_key_a_flag_and_a_line_in_a_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('router_ttl_secs = 7\nrouter_endpoint = "a.b.c"\n')
    expected = configured(
        RouterConfig, approximate_ttl_s=7.0, dynamo_namespace="a", dynamo_component="b"
    )
    assert load_router_config(("--config", str(file)), {}) == expected
    flags = ("--router-ttl-secs", "7", "--router-endpoint", "a.b.c")
    assert load_router_config(flags, {}) == expected
    fields = set(vars(flat(RouterConfig())))
    assert all((alias.setting or alias.key) in fields for alias in ALIASES if not alias.meaning)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DYN_ROUTER_ENDPOINT", "ns.backend"),
        ("DYN_ROUTER_DURABLE_KV_EVENTS", "perhaps"),
        ("DYN_ROUTER_SPEED", "1"),
        ("DYN_ROUTER_MODE", "direct"),
        ("DYN_ROUTER_APPROXIMATE_CACHE_POLICY", "lru"),
        *((name, "x") for name in REFUSED),
    ],
)
def test_unsupported_dynamo_setting_is_refused_by_name(variable, value):
    with pytest.raises(ConfigError, match=variable):
        load_router_config((), {variable: value})


def test_other_dynamo_variables_are_ignored():
    assert load_router_config((), {"DYN_NAMESPACE": "x", "DYN_SYSTEM_PORT": "1"}) == RouterConfig()


REDIS = ("--redis-url", "redis://h", "--session-affinity-ttl-s", "9")
TRACKING = tuple(f"DYN_ROUTER_TRACKING_{name}" for name in ("HASH", "KEY_FILE", "KEY_ID"))

PEERS = ("--router-peers", "10.0.0.1:8092,router-2:8092")
SERVICE = ("--router-service", "llm/routers", "--host", "::", "--insecure-public-bind")

CONTRADICTIONS = {
    ("router_tracking_hash", "router_tracking_key_file"): (
        "--router-tracking-hash", "keyed-xxh3-v1",
    ),
    ("router_tracking_key_file", "router_tracking_hash"): (
        "--router-tracking-key-file", __file__,
    ),
    ("router_track_output_blocks", "router_track_active_blocks"): (
        "--router-track-output-blocks", "--no-router-track-active-blocks",
    ),
    ("active_decode_blocks_threshold", "router_track_active_blocks"): (
        "--active-decode-blocks-threshold", "0.9", "--no-router-track-active-blocks",
    ),
    ("active_prefill_tokens_threshold", "router_track_prefill_tokens"): (
        "--active-prefill-tokens-threshold", "9", "--no-router-track-prefill-tokens",
    ),
    ("active_prefill_tokens_threshold_frac", "router_track_prefill_tokens"): (
        "--active-prefill-tokens-threshold-frac", "9", "--no-router-track-prefill-tokens",
    ),
    ("router_prefill_load_model", "router_track_prefill_tokens"): (
        "--router-prefill-load-model", "ais", "--no-router-track-prefill-tokens",
    ),
    ("overlap_score_weight", "prefill_load_scale"): (
        "--overlap-score-weight", "2", "--prefill-load-scale", "3",
    ),
    ("discovery", "discovery_selector"): ("--discovery", "pods"),
    ("discovery_selector", "discovery"): ("--discovery-selector", "app=vllm"),
    ("epp_pool", "discovery"): (
        "--epp-pool", "llm/qwen", "--discovery", "pods", "--discovery-selector", "app=vllm",
    ),
    ("policy", "overlap_score_weight"): ("--policy", "cache-aware", "--overlap-score-weight", "0"),
    ("predicted_ttl_s", "use_kv_events"): ("--predicted-ttl-s", "1", "--no-use-kv-events"),
    ("event_threads", "use_kv_events"): ("--event-threads", "2", "--no-use-kv-events"),
    ("record_to", "event_threads"): ("--record-to", "f", "--event-threads", "2"),
    ("session_affinity_mode", "session_affinity_ttl_s"): ("--session-affinity-mode", "soft"),
    ("redis_url", "session_affinity_ttl_s"): ("--redis-url", "redis://h"),
    ("redis_username", "redis_password_file"): ("--redis-username", "u", *REDIS),
    ("redis_username", "redis_url"): ("--redis-username", "u", "--redis-password-file", "p"),
    ("redis_password_file", "redis_url"): ("--redis-password-file", "p"),
    ("redis_tls_ca_file", "redis_url"): ("--redis-tls-ca-file", "c"),
    ("redis_tls_cert_file", "redis_tls_key_file"): (
        *("--redis-tls-cert-file", "c", "--redis-url", "rediss://h"),
        *("--session-affinity-ttl-s", "9"),
    ),
    ("redis_tls_cert_file", "redis_url"): (
        "--redis-tls-cert-file", "c", "--redis-tls-key-file", "k",
    ),
    ("redis_tls_key_file", "redis_url"): ("--redis-tls-key-file", "k"),
    ("reset_state", "nats_url"): ("--reset-state",),
    ("shadow_policy", "shadow"): ("--shadow-policy", "dynamo-1.6", "--shadow"),
    ("shadow", "session_affinity_ttl_s"): ("--shadow", "--session-affinity-ttl-s", "9"),
    ("router_queue_policy", "router_queue_threshold"): ("--router-queue-policy", "wspt"),
    ("router_queue_threshold", "router_track_prefill_tokens"): (
        "--router-queue-threshold", "1", "--no-router-track-prefill-tokens",
    ),
    ("router_queue_threshold", "shadow"): ("--router-queue-threshold", "1", "--shadow"),
    ("no_worker_wait_s", "shadow"): ("--no-worker-wait-s", "1", "--shadow"),
    ("scale_from_zero_models", "no_worker_wait_s"): ("--scale-from-zero-models", "llama"),
    ("max_waiting_requests", "max_connections"): (
        "--max-waiting-requests", "9", "--max-connections", "17",
    ),
    ("openai_port", "shadow"): ("--openai-port", "8000", "--shadow"),
    **{
        (each.name, "openai_port"): (f"--{each.name.replace('_', '-')}", str(each.value or 1))
        for each in settings_of(OpenAiConfig())
        if each.name != "openai_port"
    },
    ("epp_port", "shadow"): ("--epp-port", "9002", "--shadow"),
    **{
        (each.name, "epp_port"): (
            f"--{each.name.replace('_', '-')}",
            *([] if each.value is True else [str(each.value or 1)]),
        )
        for each in settings_of(PickerConfig())
        if each.name != "epp_port"
    },
    **{
        (key, other): (*named, *arguments)
        for key, named in {"router_peers": PEERS, "router_service": SERVICE}.items()
        for other, arguments in {
            "nats_url": ("--nats-url", "nats://h"),
            "router_replica_sync": ("--no-router-replica-sync",),
            "shadow": ("--shadow",),
            "router_peers_token_file": ("--token-file", __file__),
        }.items()
    },
    ("router_service", "router_peers"): (*SERVICE, *PEERS),
    ("router_service", "host"): SERVICE[:2],
    ("router_peers_token_file", "router_peers"): ("--router-peers-token-file", __file__),
    ("router_peers_ca_file", "router_peers"): ("--router-peers-ca-file", __file__),
    ("router_peers_ca_file", "tls_cert_file"): (*PEERS, "--router-peers-ca-file", __file__),
}  # fmt: skip


def test_every_rule_has_a_contradiction_test():
    assert {(rule.key, rule.other) for rule in RULES} == set(CONTRADICTIONS)


BEYOND_THE_LIMIT = ",".join(f"r{number}:8092" for number in range(65))


@pytest.mark.parametrize(
    "peers",
    ["a", "a:0", "a:70000", "http://a:1", "a:1/path", "u@a:1", "a:1,b", "a b:1", "a..b:1",
     BEYOND_THE_LIMIT],
)  # fmt: skip
def test_routers_that_are_no_addresses_are_refused(peers):
    with pytest.raises(ConfigError, match="router_peers"):
        load_router_config(("--router-peers", peers), {})


def test_routers_of_a_list_share_reservations():
    config = load_router_config(("--router-peers", " a:1, [::1]:8092,a:1,"), {})
    assert config.peers.addresses == ("a:1", "[::1]:8092")
    assert config.shares_reservations
    assert not RouterConfig().shares_reservations
    assert load_router_config(SERVICE, {}).shares_reservations


def test_settings_of_the_openai_endpoint_apply_with_its_port():
    arguments = ("--openai-port", "8000", "--max-attempts", "5", "--max-wait-s", "7")
    config = in_router(load_router(arguments, {}).config)
    assert (config.http.http_port, config.engines.max_attempts) == (8000, 5)
    assert config.router.max_wait_s == 7.0


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("--engine-token-file", "/nowhere"), "engine_token_file"),
        (("--conditional-disagg", "prefill_load"), "conditional_prefill_busy_threshold"),
    ],
    ids=["file", "condition"],
)
def test_wrong_settings_of_the_openai_endpoint_are_refused(arguments, key):
    with pytest.raises(ConfigError) as caught:
        load_router(("--openai-port", "8000", *arguments), {})
    assert caught.value.key == key


@pytest.mark.parametrize("pair", CONTRADICTIONS, ids=" ".join)
def test_a_contradiction_names_both(pair):
    with pytest.raises(ConfigError) as caught:
        load_router(CONTRADICTIONS[pair], {})
    key, other = pair
    assert caught.value.key == key
    assert f"while {other} is" in str(caught.value)


def test_a_default_gives_way():
    config = flat(load_router_config(("--no-router-track-active-blocks", "--no-use-kv-events"), {}))
    assert config.router_track_output_blocks


def test_contradiction_names_the_sources_of_both():
    environment = {"DYN_ROUTER_PREDICTED_TTL_SECS": "1"}
    with pytest.raises(ConfigError) as caught:
        load_router(("--no-use-kv-events",), environment)
    for name in ("environment: DYN_ROUTER_PREDICTED_TTL_SECS", "flag: --no-use-kv-events"):
        assert name in str(caught.value)


def test_a_policy_file_becomes_part_of_the_configuration(tmp_path):
    """So that it is shown, and recorded, with the rest."""
    file = tmp_path / "classes.toml"
    file.write_text("""
        default_policy_family = "all"
        uncached_isl_buckets = [{min_tokens = 0, bucket = "all"}]
        policy_classes = [{name = "a", policy_family = "all", cache_bucket = "all"}]
    """)
    queue = load_router_config((), {"DYN_ROUTER_POLICY_CONFIG": str(file)}).queue
    assert queue.router_policy_config.startswith('{"default_policy_family":"all"')
    assert [each.name for each in queue.queueing.policies.classes("m").all] == ["a"]


@pytest.mark.parametrize("text", [None, "x = 1", 'default_policy_family = "all"'])
def test_a_policy_file_that_makes_no_sense_is_refused_at_start(tmp_path, text):
    file = tmp_path / "classes.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="router_policy_config"):
        load_router_config(("--router-policy-config", str(file)), {})


def test_fewer_connections_leave_room_for_fewer_that_wait():
    assert load_router_config(("--max-connections", "100"), {}).queue.max_waiting_requests == 50
    assert load_router_config((), {}).queue.max_waiting_requests == 2048


def test_wait_for_a_worker_is_the_longest_of_the_openai_endpoint():
    arguments = ("--openai-port", "8000", "--max-wait-s", "7", "--no-worker-wait-s", "300")
    assert in_router(load_router(arguments, {}).config).router.max_wait_s == 300.0


def test_models_to_scale_from_zero_have_routing_groups():
    named = "llama, chat = org/llama:8b,llama"
    arguments = ("--no-worker-wait-s", "300", "--scale-from-zero-models", named)
    scopes = load_router(arguments, {}).config.core.queueing.from_zero
    assert scopes == (Scope("llama", "default"), Scope("org/llama:8b", "chat"))


@pytest.mark.parametrize("models", ["=llama", "chat=", ",".join(f"m{i}" for i in range(65))])
def test_wrong_models_to_scale_from_zero_are_refused(models):
    arguments = ("--no-worker-wait-s", "300", "--scale-from-zero-models", models)
    with pytest.raises(ConfigError, match="scale_from_zero_models"):
        load_router(arguments, {})


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"overlap_score_weight": 0.0}, "overlap_score_weight: 0.0 instead of 1.0"),
        ({"openai_port": 8000}, {"max_wait_s": 90.0}, "max_wait_s: 90.0 instead of 60.0"),
        ({"openai_port": 8000}, {"no_worker_wait_s": 90.0}, "no_worker_wait_s: 90.0 instead of"),
        ({"shadow": True}, {"router_queue_threshold": 1.0}, "a shadow router responds at once"),
    ],
)
def test_a_change_that_does_not_fit_the_running_router_is_refused(before, now, said):
    running = configured(RouterConfig, **before)
    wanted = configured(RouterConfig, **before, **now)
    with pytest.raises(ConfigError, match=said):
        changed(running, Loaded(wanted, dict.fromkeys(now, "file")))


def test_changed_limit_of_waiting_requests_leaves_connections_free():
    running = configured(RouterConfig, max_connections=100)
    wanted = configured(RouterConfig, max_connections=100, max_wait_s=70.0)
    now = changed(running, Loaded(wanted, {}))
    assert (now.queue.max_wait_s, now.queue.max_waiting_requests) == (70.0, 50)
