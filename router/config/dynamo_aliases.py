"""Dynamo's names of this router's settings: fields of `KvRouterConfig`, and `DYN_ROUTER_*`.

The names are those of 1.0.2 and 1.6.1. A setting without a counterpart is refused with a reason, so
that no operator takes it to be in effect.
"""

from collections.abc import Mapping
from types import MappingProxyType

from router.errors import ConfigError
from router.runtime.process.aliases import Alias

PREFIX = "DYN_ROUTER_"


def _worker_endpoint(value: str) -> Mapping[str, str]:
    parts = value.removeprefix("dyn://").split(".")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(f"{PREFIX}ENDPOINT", repr(value), "namespace.component.endpoint")
    return {"dynamo_namespace": parts[0], "dynamo_component": parts[1]}


def _events_are_durable(value: str) -> Mapping[str, str]:
    """Accept any boolean: events on NATS are always in JetStream here."""
    if value.lower() not in ("true", "false", "1", "0"):
        raise ConfigError(f"{PREFIX}DURABLE_KV_EVENTS", repr(value), "true or false")
    return {}


def _guesses_expire(value: str) -> Mapping[str, str]:
    """Accept `ttl` only: estimates expire here, and the oldest are pruned beyond a limit."""
    if value.lower() != "ttl":
        reason = "estimates expire by approximate_ttl_s"
        raise ConfigError(f"{PREFIX}APPROXIMATE_CACHE_POLICY", f"{value!r}: {reason}", "ttl")
    return {}


def _mode(value: str) -> Mapping[str, str]:
    """Return the policy of a mode. Dynamo's `kv` is the configured policy, whichever it is."""
    mode = value.lower().replace("_", "-")
    if mode == "kv":
        return {}
    if mode not in ("round-robin", "random", "least-loaded", "power-of-two"):
        allowed = "kv, round-robin, random, least-loaded or power-of-two"
        raise ConfigError(f"{PREFIX}MODE", repr(value), f"{allowed}; see policy")
    return {"policy": mode}


ALIASES = (
    Alias("router_mode", f"{PREFIX}MODE", meaning=_mode),
    Alias("router_endpoint", f"{PREFIX}ENDPOINT", meaning=_worker_endpoint),
    Alias("router_block_size", f"{PREFIX}BLOCK_SIZE", "dynamo_block_size"),
    Alias("kv_cache_block_size", "DYN_KV_CACHE_BLOCK_SIZE", "dynamo_block_size"),
    Alias("overlap_score_weight", f"{PREFIX}KV_OVERLAP_SCORE_WEIGHT"),
    Alias("prefill_load_scale", f"{PREFIX}PREFILL_LOAD_SCALE"),
    Alias("overlap_score_credit", f"{PREFIX}KV_OVERLAP_SCORE_CREDIT"),
    Alias("overlap_score_credit_decay", f"{PREFIX}KV_OVERLAP_SCORE_CREDIT_DECAY"),
    Alias("host_cache_hit_weight", f"{PREFIX}HOST_CACHE_HIT_WEIGHT"),
    Alias("disk_cache_hit_weight", f"{PREFIX}DISK_CACHE_HIT_WEIGHT"),
    Alias("shared_cache_multiplier", "DYN_SHARED_CACHE_MULTIPLIER"),
    Alias("decode_active_request_weight", f"{PREFIX}DECODE_ACTIVE_REQUEST_WEIGHT"),
    Alias("router_temperature", f"{PREFIX}TEMPERATURE"),
    Alias("use_kv_events", f"{PREFIX}USE_KV_EVENTS"),
    Alias("durable_kv_events", f"{PREFIX}DURABLE_KV_EVENTS", meaning=_events_are_durable),
    Alias("router_replica_sync", f"{PREFIX}REPLICA_SYNC"),
    Alias("router_track_active_blocks", f"{PREFIX}TRACK_ACTIVE_BLOCKS"),
    Alias("router_track_output_blocks", f"{PREFIX}TRACK_OUTPUT_BLOCKS"),
    Alias("router_track_prefill_tokens", f"{PREFIX}TRACK_PREFILL_TOKENS"),
    Alias("router_prefill_load_model", f"{PREFIX}PREFILL_LOAD_MODEL"),
    Alias("router_tracking_hash", f"{PREFIX}TRACKING_HASH"),
    Alias("router_tracking_key_file", f"{PREFIX}TRACKING_KEY_FILE"),
    Alias("router_tracking_key_id", f"{PREFIX}TRACKING_KEY_ID"),
    Alias("router_assume_kv_reuse", f"{PREFIX}ASSUME_KV_REUSE"),
    Alias("router_snapshot_threshold", f"{PREFIX}SNAPSHOT_THRESHOLD", "snapshot_threshold"),
    Alias("router_reset_states", f"{PREFIX}RESET_STATES", "reset_state"),
    Alias("router_ttl_secs", f"{PREFIX}TTL_SECS", "approximate_ttl_s"),
    Alias(
        "router_approximate_cache_policy",
        f"{PREFIX}APPROXIMATE_CACHE_POLICY",
        meaning=_guesses_expire,
    ),
    Alias("router_max_tree_size", f"{PREFIX}MAX_TREE_SIZE", "approximate_max_blocks"),
    Alias("router_prune_target_ratio", f"{PREFIX}PRUNE_TARGET_RATIO", "approximate_prune_target"),
    Alias("router_predicted_ttl_secs", f"{PREFIX}PREDICTED_TTL_SECS", "predicted_ttl_s"),
    Alias("router_event_threads", f"{PREFIX}EVENT_THREADS", "event_threads"),
    Alias("router_min_initial_workers", f"{PREFIX}MIN_INITIAL_WORKERS", "min_initial_workers"),
    Alias("router_queue_threshold", f"{PREFIX}QUEUE_THRESHOLD"),
    Alias("router_queue_policy", f"{PREFIX}QUEUE_POLICY"),
    Alias("router_policy_config", f"{PREFIX}POLICY_CONFIG"),
    Alias(
        "router_session_affinity_ttl_secs",
        f"{PREFIX}SESSION_AFFINITY_TTL_SECS",
        "session_affinity_ttl_s",
    ),
    Alias(
        "router_session_affinity_mode", f"{PREFIX}SESSION_AFFINITY_MODE", "session_affinity_mode"
    ),
    Alias(
        "router_active_request_expiry_secs",
        f"{PREFIX}ACTIVE_REQUEST_EXPIRY_SECS",
        "reservation_ttl_s",
    ),
    Alias("active_decode_blocks_threshold", "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD"),
    Alias("active_prefill_tokens_threshold", "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD"),
    Alias("active_prefill_tokens_threshold_frac", "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC"),
)

REFUSED = MappingProxyType(
    {
        f"{PREFIX}OVERLAP_REFRESH_AFTER_SECS": "requests that waited are always matched again",
        f"{PREFIX}LOAD_AWARE": "the policy least-loaded uses load only",
        f"{PREFIX}WORKER_SELECTION_POLICY": "policies are set by policy and group_policies",
        f"{PREFIX}PREFILL_POLICY": "all roles of a routing group have one policy",
        f"{PREFIX}DECODE_POLICY": "all roles of a routing group have one policy",
    }
)
"""Variables without a counterpart, each with the reason."""
