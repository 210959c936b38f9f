"""Parts that a router has only where its settings ask for them; for some an extra is installed."""

from pathlib import Path
from typing import TYPE_CHECKING

from router.config import RouterConfig
from router.core import RouterCore
from router.decision_log import DecisionLog
from router.errors import ConfigError
from router.metrics import RouterMetrics
from router.scheduler.affinity import AffinityTable
from router.security.redis_access import RedisAccess
from router.sessions import LocalSessions, Sessions
from router.state_metrics import SessionCollector

if TYPE_CHECKING:  # the extra `otel` may not be installed
    from router.tracing import Tracer


def make_sessions(config: RouterConfig, metrics: RouterMetrics) -> Sessions | None:
    """Where sessions are bound to workers. Raises ConfigError."""
    if not config.session_affinity_ttl_s:
        return None
    table = AffinityTable(config.session_affinity_ttl_s, config.session_affinity_max_sessions)
    SessionCollector(table, metrics)
    local = LocalSessions(table)
    return _shared_sessions(config, metrics, local) if config.redis_url else local


def make_decision_log(
    config: RouterConfig, core: RouterCore, metrics: RouterMetrics
) -> DecisionLog | None:
    """Where decisions are written down. Raises ConfigError."""
    if not config.decision_log:
        return None
    per_s, max_bytes = config.decision_log_per_s, config.decision_log_max_bytes
    decision_log = DecisionLog(core, Path(config.decision_log), per_s, max_bytes)
    metrics.registry.register(decision_log)
    return decision_log


def make_tracer(config: RouterConfig, metrics: RouterMetrics) -> "Tracer | None":
    """Who is told of decisions as spans. Raises ConfigError."""
    if not config.otlp_endpoint:
        return None
    try:
        from router.tracing import Tracer
    except ImportError as error:
        raise ConfigError("otlp_endpoint", str(error), "with kv-router[otel] installed") from error
    tracer = Tracer(config.otlp_endpoint, config.name, config.trace_ratio)
    metrics.registry.register(tracer)
    return tracer


def _shared_sessions(
    config: RouterConfig, metrics: RouterMetrics, local: LocalSessions
) -> Sessions:
    try:
        from router.redis_sessions import RedisSessions
    except ImportError as error:
        raise ConfigError("redis_url", str(error), "with kv-router[redis] installed") from error
    url, namespace, ttl_s = config.redis_url, config.namespace, config.session_affinity_ttl_s
    timeout_s, access = config.redis_timeout_s, _redis_access(config)
    return RedisSessions(url, namespace, ttl_s, timeout_s, local, metrics, access)


def _redis_access(config: RouterConfig) -> RedisAccess:
    return RedisAccess(
        config.redis_username,
        config.redis_password_file,
        config.redis_tls_ca_file,
        config.redis_tls_cert_file,
        config.redis_tls_key_file,
    )
