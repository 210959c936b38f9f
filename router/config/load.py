"""Loading of a router's configuration; contradictions between settings are refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct, structs

from router.config.dynamo_aliases import ALIASES, PREFIX, REFUSED
from router.config.openai import OpenAiConfig, check_engines
from router.config.picker import PickerConfig, check_picker
from router.config.queue import policy_file_text
from router.config.router import RouterConfig
from router.errors import ConfigError
from router.protocol.values import KEYED_SCHEME
from router.runtime.process.aliases import check_variables
from router.runtime.process.loading import Loaded, load_with_sources
from router.runtime.process.setting_rules import ConflictRule, check_rules
from router.runtime.process.settings import ROUTER_PREFIX, settings_of
from router.runtime.security.config import (
    check_nats_url,
    check_readable,
    check_security,
    is_loopback,
)

T = TypeVar("T", bound=Struct)

_PEER_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("nats_url", lambda c: bool(c.nats_url), "reservations are shared over one of the two"),
    (
        "router_replica_sync",
        lambda c: not c.router_replica_sync,
        "reservations are not shared",
    ),
    ("shadow", lambda c: c.shadow, "a shadow router has no reservations of its own"),
    (
        "router_peers_token_file",
        lambda c: bool(c.token_file) and not c.router_peers_token_file,
        "the other routers require a token, as this one does (token_file)",
    ),
)
"""What contradicts other routers without a bus: the other setting, whether it does, and why."""

RULES: tuple[ConflictRule, ...] = (
    ConflictRule(
        "router_track_output_blocks",
        "router_track_active_blocks",
        lambda c: c.router_track_output_blocks and not c.router_track_active_blocks,
        "output blocks are added to a request's blocks, which are not tracked",
    ),
    ConflictRule(
        "active_decode_blocks_threshold",
        "router_track_active_blocks",
        lambda c: c.active_decode_blocks_threshold is not None and not c.router_track_active_blocks,
        "without tracking, the blocks in use are unknown",
    ),
    ConflictRule(
        "active_prefill_tokens_threshold",
        "router_track_prefill_tokens",
        lambda c: (
            c.active_prefill_tokens_threshold is not None and not c.router_track_prefill_tokens
        ),
        "without tracking, the tokens to compute are unknown",
    ),
    ConflictRule(
        "active_prefill_tokens_threshold_frac",
        "router_track_prefill_tokens",
        lambda c: (
            c.active_prefill_tokens_threshold_frac is not None and not c.router_track_prefill_tokens
        ),
        "without tracking, the tokens to compute are unknown",
    ),
    ConflictRule(
        "router_prefill_load_model",
        "router_track_prefill_tokens",
        lambda c: c.router_prefill_load_model == "ais" and not c.router_track_prefill_tokens,
        "without tracking, the prompts to compute are unknown",
    ),
    ConflictRule(
        "router_tracking_hash",
        "router_tracking_key_file",
        lambda c: c.router_tracking_hash == KEYED_SCHEME and not c.router_tracking_key_file,
        "keyed block names need a key",
    ),
    ConflictRule(
        "router_tracking_key_file",
        "router_tracking_hash",
        lambda c: bool(c.router_tracking_key_file) and c.router_tracking_hash != KEYED_SCHEME,
        "public block names need no key",
    ),
    ConflictRule(
        "overlap_score_weight",
        "prefill_load_scale",
        lambda c: c.prefill_load_scale not in (None, c.overlap_score_weight),
        "they are two names of one setting",
    ),
    ConflictRule(
        "policy",
        "overlap_score_weight",
        lambda c: c.policy == "cache-aware" and c.overlap_score_weight == 0,
        "the policy depends on an index of caches, which is off then",
    ),
    ConflictRule(
        "predicted_ttl_s",
        "use_kv_events",
        lambda c: c.predicted_ttl_s > 0 and not c.use_kv_events,
        "it covers the time until events arrive, and none arrive; see approximate_ttl_s",
    ),
    ConflictRule(
        "event_threads",
        "use_kv_events",
        lambda c: c.event_threads > 1 and not c.use_kv_events,
        "without events there is nothing to apply in threads",
    ),
    ConflictRule(
        "record_to",
        "event_threads",
        lambda c: bool(c.record_to) and c.event_threads > 1,
        "the timing of threads cannot be replayed",
    ),
    ConflictRule(
        "session_affinity_mode",
        "session_affinity_ttl_s",
        lambda c: not c.session_affinity_ttl_s,
        "without a session lifetime, no session is bound",
    ),
    ConflictRule(
        "redis_url",
        "session_affinity_ttl_s",
        lambda c: bool(c.redis_url) and not c.session_affinity_ttl_s,
        "there are no sessions to share",
    ),
    ConflictRule(
        "redis_username",
        "redis_password_file",
        lambda c: bool(c.redis_username) and not c.redis_password_file,
        "a user name needs a password",
    ),
    *(
        ConflictRule(
            key,
            "redis_url",
            lambda c: not c.redis_url or "@" in c.redis_url,
            "there is no Redis to log in to, or its URL has a login already",
        )
        for key in ("redis_username", "redis_password_file")
    ),
    *(
        ConflictRule(
            key,
            "redis_url",
            lambda c: not c.redis_url.startswith("rediss://"),
            "only rediss:// is encrypted",
        )
        for key in ("redis_tls_ca_file", "redis_tls_cert_file", "redis_tls_key_file")
    ),
    ConflictRule(
        "redis_tls_cert_file",
        "redis_tls_key_file",
        lambda c: not c.redis_tls_key_file,
        "a certificate needs its private key",
    ),
    ConflictRule(
        "reset_state",
        "nats_url",
        lambda c: c.reset_state and not c.nats_url,
        "there is no snapshot to drop, and no agent to request one from",
    ),
    ConflictRule(
        "shadow",
        "session_affinity_ttl_s",
        lambda c: c.shadow and c.session_affinity_ttl_s > 0,
        "a shadow router binds no session",
    ),
    ConflictRule(
        "shadow_policy",
        "shadow",
        lambda c: bool(c.shadow_policy) and c.shadow,
        "a shadow router compares its own choices already",
    ),
    ConflictRule(
        "router_queue_policy",
        "router_queue_threshold",
        lambda c: c.router_queue_threshold is None,
        "no request waits; the classes of router_policy_config have policies of their own",
    ),
    ConflictRule(
        "router_queue_threshold",
        "router_track_prefill_tokens",
        lambda c: c.router_queue_threshold is not None and not c.router_track_prefill_tokens,
        "without tracking, no rank is ever busy",
    ),
    ConflictRule(
        "router_queue_threshold",
        "shadow",
        lambda c: c.router_queue_threshold is not None and c.shadow,
        "a shadow router responds at once",
    ),
    ConflictRule(
        "no_worker_wait_s",
        "shadow",
        lambda c: c.no_worker_wait_s > 0 and c.shadow,
        "a shadow router responds at once",
    ),
    ConflictRule(
        "scale_from_zero_models",
        "no_worker_wait_s",
        lambda c: bool(c.scale_from_zero_models) and not c.no_worker_wait_s,
        "without it no request waits for a worker",
    ),
    ConflictRule(
        "max_waiting_requests",
        "max_connections",
        lambda c: c.max_waiting_requests > c.max_connections // 2,
        "each waiting request keeps a connection; half of them are for requests that free ranks",
    ),
    ConflictRule(
        "discovery",
        "discovery_selector",
        lambda c: c.discovery != "none" and not c.discovery_selector,
        "not every pod is an engine",
    ),
    ConflictRule(
        "discovery_selector",
        "discovery",
        lambda c: bool(c.discovery_selector) and c.discovery == "none",
        "discovery is off",
    ),
    ConflictRule(
        "epp_pool",
        "discovery",
        lambda c: bool(c.epp_pool) and c.discovery != "none",
        "the pool says which pods are engines",
    ),
    ConflictRule(
        "openai_port",
        "shadow",
        lambda c: c.openai_port > 0 and c.shadow,
        "a shadow router places no request of its own",
    ),
    *(
        ConflictRule(
            each.name,
            "openai_port",
            lambda c: not c.openai_port and not c.epp_port,
            "it is a setting of the OpenAI endpoint and the endpoint picker, which are off",
        )
        for each in settings_of(OpenAiConfig())
        if each.name != "openai_port"
    ),
    *(
        ConflictRule(
            key,
            other,
            lambda c, key=key, test=test: bool(getattr(c, key)) and test(c),  # type: ignore[misc]
            why,
        )
        for key in ("router_peers", "router_service")
        for other, test, why in _PEER_RULES
    ),
    ConflictRule(
        "router_service",
        "router_peers",
        lambda c: bool(c.router_service) and bool(c.router_peers),
        "the Service says which routers there are",
    ),
    ConflictRule(
        "router_service",
        "host",
        lambda c: bool(c.router_service) and is_loopback(c.host),
        "routers of other pods cannot reach this address",
    ),
    *(
        ConflictRule(
            key,
            "router_peers",
            lambda c, key=key: (  # type: ignore[misc]
                bool(getattr(c, key)) and not (c.router_peers or c.router_service)
            ),
            "no router is named by router_peers or router_service",
        )
        for key in ("router_peers_token_file", "router_peers_ca_file")
    ),
    ConflictRule(
        "router_peers_ca_file",
        "tls_cert_file",
        lambda c: bool(c.router_peers_ca_file) and not c.tls_cert_file,
        "routers without certificates serve HTTP, and so do the others",
    ),
    ConflictRule(
        "epp_port",
        "shadow",
        lambda c: c.epp_port > 0 and c.shadow,
        "a shadow router places no request of its own",
    ),
    *(
        ConflictRule(
            each.name,
            "epp_port",
            lambda c: not c.epp_port,
            "it is a setting of the endpoint picker, which is off",
        )
        for each in settings_of(PickerConfig())
        if each.name != "epp_port"
    ),
)
"""The rules, in no particular order."""


def check_router(config: RouterConfig, sources: Mapping[str, str]) -> None:
    """Refuse settings that contradict each other. Raises ConfigError."""
    check_rules(RULES, config, sources)
    check_security(config, config.security, config.block_keys, sources)
    check_engines(config.openai.engines, config.openai.prefill)
    _ = config.openai.completions.origins  # raises for an invalid one
    check_picker(config.picker)
    _ = config.peers.addresses  # raises for an invalid one
    for key in ("router_peers_token_file", "router_peers_ca_file"):
        check_readable(key, getattr(config.peers, key))
    check_nats_url("dynamo_nats_url", config.dynamo.dynamo_nats_url)
    _ = config.placement.tracking_key
    _ = config.queue.from_zero
    if config.policy.group_splits:
        _ = config.policy.splits


def load_router(arguments: Sequence[str], environment: Mapping[str, str]) -> Loaded[RouterConfig]:
    """Load the configuration of a router; settings may have Dynamo's names, too.

    Raises ConfigError, also for settings that contradict each other.
    """
    loaded = load_extended(RouterConfig, arguments, environment)
    check_router(loaded.config, loaded.sources)
    loaded = structs.replace(loaded, config=completed(loaded.config))
    return with_warnings(loaded, loaded.config)


def with_warnings(loaded: Loaded[T], router: RouterConfig) -> Loaded[T]:
    """Return a configuration that is to be printed with warnings about its router's settings.

    Raises ConfigError if an installed policy is wrong.
    """
    if not loaded.is_asked_for:
        return loaded
    from router.config.core import every_policy  # with the kernels, which `--help` does not need

    return structs.replace(loaded, warnings=router.unused(every_policy()))


def load_extended(
    config_type: type[T], arguments: Sequence[str], environment: Mapping[str, str]
) -> Loaded[T]:
    """Load a configuration with a router's settings, unchecked. Raises ConfigError."""
    check_variables(environment, PREFIX, ALIASES, REFUSED)
    return load_with_sources(config_type, arguments, environment, ROUTER_PREFIX, aliases=ALIASES)


def load_router_config(arguments: Sequence[str], environment: Mapping[str, str]) -> RouterConfig:
    """Load the configuration of a router that serves. Shows it and exits on `--show-config`."""
    return load_router(arguments, environment).shown()


def completed(config: RouterConfig) -> RouterConfig:
    """Return the configuration with the text of its policy file, and waiting requests limited."""
    path = config.queue.router_policy_config
    queue = structs.replace(
        config.queue, router_policy_config=policy_file_text(path) if path else ""
    )
    return _limited(structs.replace(config, queue=queue))


def changed(before: RouterConfig, loaded: Loaded[RouterConfig]) -> RouterConfig:
    """Return the configuration of a running router after changes of its live settings.

    Raises ConfigError if these do not fit to the others, or to what was built at the start.
    """
    now = loaded.config
    check_router(now, loaded.sources)
    weights = (before.policy.overlap_score_weight, now.policy.overlap_score_weight)
    if (weights[0] == 0) != (weights[1] == 0):
        reason = f"{weights[1]} instead of {weights[0]}: the index is turned off or on at a restart"
        raise ConfigError("overlap_score_weight", reason, "0 to 0, or a weight to another one")
    if now.openai.openai_port or now.picker.epp_port:
        for name in ("max_wait_s", "no_worker_wait_s"):
            was, wanted = getattr(before.queue, name), getattr(now.queue, name)
            if wanted > max(before.queue.max_wait_s, before.queue.no_worker_wait_s):
                reason = f"{wanted} instead of {was}: the OpenAI endpoint waits longer at a restart"
                raise ConfigError(name, reason, "at most the longer of both, as in force")
    return _limited(now)


def _limited(config: RouterConfig) -> RouterConfig:
    """Return a configuration with half of the connections for requests that do not wait."""
    most = max(1, min(config.queue.max_waiting_requests, config.service.max_connections // 2))
    return structs.replace(config, queue=structs.replace(config.queue, max_waiting_requests=most))
