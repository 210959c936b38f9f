"""Optional components, created if settings require them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from shlex import quote
from typing import TYPE_CHECKING

from msgspec import json

from router.api.sessions import LocalSessions, Sessions
from router.config.discovery import ClusterConfig
from router.config.observability import ObservabilityConfig
from router.config.router import RouterConfig
from router.config.sessions import SessionConfig
from router.core.core import RouterCore
from router.discovery.attach.attachments import Attachments
from router.errors import ConfigError
from router.ingest.peer_bus import PeerBus
from router.observability.decision_log import DECISION_LOG_METRICS, DecisionLog
from router.observability.health import ServiceStatus
from router.observability.metrics import RouterMetrics
from router.observability.state_metrics import SESSION_METRICS
from router.protocol.replicas import PeerGreeting
from router.runtime.process.metrics import expose
from router.scheduler.affinity import AffinityTable
from router.service.host import CoreHost

if TYPE_CHECKING:
    from router.discovery.kubernetes.discovery import Discovery
    from router.discovery.kubernetes.peer_watch import PeerWatch
    from router.discovery.kubernetes.pool_watch import PoolWatch
    from router.observability.tracing import Tracer


def make_sessions(config: SessionConfig, namespace: str, metrics: RouterMetrics) -> Sessions | None:
    """Return the session bindings, or None without session affinity. Raises ConfigError."""
    if not config.session_affinity_ttl_s:
        return None
    table = AffinityTable(config.session_affinity_ttl_s, config.session_affinity_max_sessions)
    expose(metrics.registry, "kv_router_", SESSION_METRICS, table)
    local = LocalSessions(table)
    return _shared_sessions(config, namespace, metrics, local) if config.redis_url else local


def make_decision_log(
    config: ObservabilityConfig, core: RouterCore, metrics: RouterMetrics
) -> DecisionLog | None:
    """Return the decision log, or None if it is off. Raises ConfigError."""
    if not config.decision_log:
        return None
    per_s, max_bytes = config.decision_log_per_s, config.decision_log_max_bytes
    decision_log = DecisionLog(core, Path(config.decision_log), per_s, max_bytes)
    expose(metrics.registry, "kv_router_decision_log_", DECISION_LOG_METRICS, decision_log)
    return decision_log


def make_tracer(config: ObservabilityConfig, name: str, metrics: RouterMetrics) -> "Tracer | None":
    """Return the tracer of decisions, or None if it is off. Raises ConfigError."""
    if not config.otlp_endpoint:
        return None
    try:
        from router.observability.tracing import TRACER_METRICS, Tracer
    except ImportError as error:
        raise ConfigError("otlp_endpoint", str(error), "with kv-router[otel] installed") from error
    tracer = Tracer(config.otlp_endpoint, name, config.trace_ratio)
    expose(metrics.registry, "kv_router_", TRACER_METRICS, tracer)
    return tracer


def make_peers(
    config: RouterConfig, incarnation: int, metrics: RouterMetrics, status: ServiceStatus
) -> tuple[PeerBus | None, "PeerWatch | None"]:
    """Return the other routers without a bus, and the Service that says which there are.

    None with a bus, or without others; no Service if they are named. Raises ConfigError.
    """
    if not config.peers.are_set:
        return None, None
    own = (config.router_id, incarnation, config.service.name)
    greeting = PeerGreeting(*own, config.bus.namespace, config.naming.booking_scheme)
    peers = PeerBus(config.peers, config.security, greeting, metrics.registry, Random())
    status.peers, status.peer_problems = peers.views, peers.problems
    if not config.peers.router_service:
        peers.set_addresses(config.peers.addresses)
        return peers, None
    from router.discovery.kubernetes.peer_watch import PeerWatch

    watch = PeerWatch(config, peers.set_addresses, metrics.registry, Random())
    peers.name_certificates(watch.tls_name)
    status.peer_problems = lambda: [*watch.problems(), *peers.problems()]
    return peers, watch


def _shared_sessions(
    config: SessionConfig, namespace: str, metrics: RouterMetrics, local: LocalSessions
) -> Sessions:
    try:
        from router.api.redis_sessions import RedisSessions
    except ImportError as error:
        raise ConfigError("redis_url", str(error), "with kv-router[redis] installed") from error
    url, ttl_s = config.redis_url, config.session_affinity_ttl_s
    timeout_s, access = config.redis_timeout_s, config.redis_access
    return RedisSessions(url, namespace, ttl_s, timeout_s, local, metrics, access)


def next_steps(url: str, openai_url: str | None, models: Sequence[str]) -> Iterator[str]:
    """Yield what to do with a router that has started on a terminal, a command in each line.

    `openai_url`: of its OpenAI endpoint, or None; `models`: those that its workers serve.
    """
    if not models:
        yield f"attach an engine  kv-router attach http://HOST:8000 --url {url}"
    else:
        yield f"see its workers   kv-router top --url {url}"
    model, as_json = models[0] if models else "MODEL", "-H 'content-type: application/json'"
    body: dict[str, object] = {"model_name": model, "token_ids": [1, 2, 3]}
    at = f"{url}/select"
    if openai_url is not None:
        body = {"model": model, "prompt": "Once", "max_tokens": 8}
        at = f"{openai_url}/completions"
    yield f"try a prompt      curl -s {at} {as_json} -d {quote(json.encode(body).decode())}"


def make_pool(config: ClusterConfig, status: ServiceStatus) -> "PoolWatch | None":
    """Return the watch of the InferencePool, or None without one."""
    if not config.epp_pool:
        return None
    from router.discovery.kubernetes.pool_watch import PoolWatch

    pool = PoolWatch(config, Random())
    status.cluster_problem = pool.unready_reason
    return pool


def make_discovery(
    config: RouterConfig, host: CoreHost, pool: "PoolWatch | None", attachments: Attachments
) -> "Discovery | None":
    """Return the discovery of engines in Kubernetes, or None if it is off."""
    if config.discovery.discovery == "none" and pool is None:
        return None
    from router.discovery.kubernetes.discovery import Discovery, LabelledEngines
    from router.discovery.kubernetes.pool_engines import PoolEngines

    registrar, registry = host.registrar, host.metrics.registry
    source: PoolEngines | LabelledEngines
    if pool is not None:
        source = PoolEngines(pool, attachments)
    else:
        source = LabelledEngines(config.discovery, config.cluster, registrar, Random())
    return Discovery(config.discovery, source, host.registrations, registrar.held, registry)
