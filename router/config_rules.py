"""Settings that contradict each other, refused at start with both named."""

from collections.abc import Mapping

from router.config import RouterConfig
from router.contradictions import Rule, check_rules
from router.security.config import check_nats_url, check_security
from router.sequence.tracking_names import ALGORITHM


def _has_no_login_to_give(config: RouterConfig) -> bool:
    return "@" in config.redis_url if config.redis_url else True


def _is_redis_in_the_clear(config: RouterConfig) -> bool:
    return not config.redis_url.startswith("rediss://")


RULES: tuple[Rule[RouterConfig], ...] = (
    Rule(
        "router_track_output_blocks",
        "router_track_active_blocks",
        lambda c: c.router_track_output_blocks and not c.router_track_active_blocks,
        "output blocks are added to a request's blocks, which are not tracked",
    ),
    Rule(
        "active_decode_blocks_threshold",
        "router_track_active_blocks",
        lambda c: c.active_decode_blocks_threshold is not None and not c.router_track_active_blocks,
        "without tracking, the blocks in use are unknown",
    ),
    Rule(
        "active_prefill_tokens_threshold",
        "router_track_prefill_tokens",
        lambda c: (
            c.active_prefill_tokens_threshold is not None and not c.router_track_prefill_tokens
        ),
        "without tracking, the tokens to compute are unknown",
    ),
    Rule(
        "active_prefill_tokens_threshold_frac",
        "router_track_prefill_tokens",
        lambda c: (
            c.active_prefill_tokens_threshold_frac is not None and not c.router_track_prefill_tokens
        ),
        "without tracking, the tokens to compute are unknown",
    ),
    Rule(
        "router_prefill_load_model",
        "router_track_prefill_tokens",
        lambda c: c.router_prefill_load_model == "ais" and not c.router_track_prefill_tokens,
        "without tracking there is no prompt to be computed",
    ),
    Rule(
        "router_tracking_hash",
        "router_tracking_key_file",
        lambda c: c.router_tracking_hash == ALGORITHM and not c.router_tracking_key_file,
        "what is keyed needs a key",
    ),
    Rule(
        "router_tracking_key_file",
        "router_tracking_hash",
        lambda c: bool(c.router_tracking_key_file) and c.router_tracking_hash != ALGORITHM,
        "public names need no key",
    ),
    Rule(
        "overlap_score_weight",
        "prefill_load_scale",
        lambda c: c.prefill_load_scale not in (None, c.overlap_score_weight),
        "they are two names of one setting",
    ),
    Rule(
        "policy",
        "overlap_score_weight",
        lambda c: c.policy == "cache-aware" and c.overlap_score_weight == 0,
        "it goes by caches, of which nothing is kept then",
    ),
    Rule(
        "predicted_ttl_s",
        "use_kv_events",
        lambda c: c.predicted_ttl_s > 0 and not c.use_kv_events,
        "it bridges the time until events come, and none do; see approximate_ttl_s",
    ),
    Rule(
        "event_threads",
        "use_kv_events",
        lambda c: c.event_threads > 1 and not c.use_kv_events,
        "without events nothing is applied in threads",
    ),
    Rule(
        "session_affinity_mode",
        "session_affinity_ttl_s",
        lambda c: not c.session_affinity_ttl_s,
        "sessions stay nowhere",
    ),
    Rule(
        "redis_url",
        "session_affinity_ttl_s",
        lambda c: bool(c.redis_url) and not c.session_affinity_ttl_s,
        "there are no sessions to share",
    ),
    Rule(
        "redis_username",
        "redis_password_file",
        lambda c: bool(c.redis_username) and not c.redis_password_file,
        "a user has a password",
    ),
    *(
        Rule(
            key,
            "redis_url",
            _has_no_login_to_give,
            "there is no Redis to log in to, or its URL has a login already",
        )
        for key in ("redis_username", "redis_password_file")
    ),
    *(
        Rule(
            key,
            "redis_url",
            _is_redis_in_the_clear,
            "only rediss:// is encrypted",
        )
        for key in ("redis_tls_ca_file", "redis_tls_cert_file", "redis_tls_key_file")
    ),
    Rule(
        "redis_tls_cert_file",
        "redis_tls_key_file",
        lambda c: not c.redis_tls_key_file,
        "a certificate is proven by its key",
    ),
    Rule(
        "reset_state",
        "nats_url",
        lambda c: c.reset_state and not c.nats_url,
        "there is no snapshot to drop, and no agent to ask",
    ),
    Rule(
        "shadow",
        "session_affinity_ttl_s",
        lambda c: c.shadow and c.session_affinity_ttl_s > 0,
        "a router that only compares binds no session",
    ),
    Rule(
        "router_queue_policy",
        "router_queue_threshold",
        lambda c: c.router_queue_threshold is None,
        "nothing waits; the classes of router_policy_config have policies of their own",
    ),
    Rule(
        "router_queue_threshold",
        "router_track_prefill_tokens",
        lambda c: c.router_queue_threshold is not None and not c.router_track_prefill_tokens,
        "without tracking, no rank is ever busy",
    ),
    Rule(
        "router_queue_threshold",
        "shadow",
        lambda c: c.router_queue_threshold is not None and c.shadow,
        "a router that only compares answers at once",
    ),
    Rule(
        "max_waiting_requests",
        "max_connections",
        lambda c: c.max_waiting_requests > c.max_connections // 2,
        "each waiting request keeps a connection; half of them are for requests that free ranks",
    ),
    Rule(
        "discovery",
        "discovery_selector",
        lambda c: c.discovery != "none" and not c.discovery_selector,
        "not every pod is an engine",
    ),
    Rule(
        "discovery_selector",
        "discovery",
        lambda c: bool(c.discovery_selector) and c.discovery == "none",
        "discovery is off",
    ),
)
"""In no order; a new pair is a new line here."""


def check_router(config: RouterConfig, sources: Mapping[str, str]) -> None:
    """Refuse contradictions among what somebody set. Raises ConfigError."""
    check_rules(RULES, config, sources)
    check_security(config, sources)
    check_nats_url("dynamo_nats_url", config.dynamo_nats_url)
    _ = config.tracking_key
