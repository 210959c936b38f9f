"""Configuration of `kv-router forward`; `--help` prints it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Struct

from router.errors import ConfigError
from router.forward.prefill.config import PrefillConfig, check_prefill
from router.protocol.index_service import is_http_url
from router.protocol.subjects import NAMESPACE_PATTERN
from router.runtime.http_client import PoolLimits
from router.runtime.http_server.config import BodyConfig, HttpServerConfig, LogConfig
from router.runtime.process.settings import FORWARD_PREFIX, Loaded, about, load_with_sources
from router.runtime.security.config import (
    BlockKeyConfig,
    NatsConfig,
    SecurityConfig,
    check_readable,
    check_security,
)
from router.runtime.security.http_access import HttpAccess


class UpstreamConfig(Struct, frozen=True, kw_only=True):
    """The router, and how it is reached."""

    nats_url: Annotated[str, about("NATS server with JetStream")] = ""
    router_url: Annotated[str, about("URL of the router; not used with nats_url")] = (
        "http://127.0.0.1:8092"
    )
    namespace: Annotated[
        str, about("name of the fleet on the bus, with nats_url", pattern=f"^{NAMESPACE_PATTERN}$")
    ] = "default"
    router_token_file: Annotated[
        str, about("file with a token for the router, with the scopes route and admin")
    ] = ""
    router_tls_ca_file: Annotated[
        str, about("PEM file of certificate authorities for the router; empty: the system's")
    ] = ""
    router_tls_cert_file: Annotated[str, about("PEM certificate for the router")] = ""
    router_tls_key_file: Annotated[str, about("PEM file of the certificate's private key")] = ""
    routing_group: Annotated[str, about("routing group to use", min_length=1)] = "default"
    max_wait_s: Annotated[float, about("limit of the wait in the router's queue", gt=0)] = 60.0

    @property
    def access(self) -> HttpAccess:
        """Credentials and TLS of the router."""
        return HttpAccess(
            self.router_token_file,
            self.router_tls_ca_file,
            self.router_tls_cert_file,
            self.router_tls_key_file,
        )


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Connections to engines, and what follows when one fails."""

    engine_token_file: Annotated[
        str, about("file with a token for the engines, instead of the client's own")
    ] = ""
    engine_connections: Annotated[
        int, about("connections to each engine; beyond that, another worker is tried", ge=1)
    ] = 2048
    connect_timeout_s: Annotated[
        float, about("time to connect to an engine; after that another worker is tried", gt=0)
    ] = 3.0
    first_byte_timeout_s: Annotated[
        float,
        about("time for an engine to begin its response; after that another worker is tried", gt=0),
    ] = 600.0
    idle_timeout_s: Annotated[
        float, about("timeout of a response that brings no new data", gt=0)
    ] = 120.0
    answer_limit_bytes: Annotated[
        int, about("size of a response that is no stream; beyond that, 502", ge=1024)
    ] = 64 * 1024 * 1024
    max_attempts: Annotated[int, about("workers tried for one request", ge=1, le=64)] = 3
    max_migrations: Annotated[
        int, about("limit of migrations of a stream to another worker; 0: none", ge=0, le=64)
    ] = 2
    breaker_failures: Annotated[
        int, about("failures in a row after which a worker is avoided for a while", ge=1)
    ] = 5
    breaker_open_s: Annotated[
        float, about("time it is avoided at first; doubled by each failed probe", gt=0)
    ] = 5.0
    probe_interval_s: Annotated[
        float,
        about("time between health probes of each worker; 0: only failed ones are probed", ge=0),
    ] = 10.0

    @property
    def pool_limits(self) -> PoolLimits:
        """Limits of connections to engines."""
        return PoolLimits(
            self.engine_connections, self.connect_timeout_s, self.first_byte_timeout_s
        )


class ForwardConfig(Struct, frozen=True, kw_only=True):
    """All settings of a forwarder."""

    security: SecurityConfig = SecurityConfig()
    http: HttpServerConfig = HttpServerConfig(http_port=8000)
    bodies: BodyConfig = BodyConfig()
    logs: LogConfig = LogConfig()
    nats: NatsConfig = NatsConfig()
    block_keys: BlockKeyConfig = BlockKeyConfig()
    router: UpstreamConfig = UpstreamConfig()
    engines: EngineConfig = EngineConfig()
    prefill: PrefillConfig = PrefillConfig()
    mode: Annotated[
        Literal["push", "direct"],
        about(
            "push: to the worker that the router chooses; direct: to the one that the request names"
        ),
    ] = "push"
    bodies_limit_bytes: Annotated[
        int, about("size of all bodies of requests in flight together; beyond that, 503", ge=1024)
    ] = 2 * 1024 * 1024 * 1024
    max_connections: Annotated[
        int, about("connections of clients; beyond that, 503 and closed", ge=1)
    ] = 8192
    known_tokens: Annotated[
        int, about("size of the cache of tokenized prompts, in tokens", ge=0)
    ] = 8_000_000
    tokenizer: Annotated[
        str,
        about(
            "tokenizer.json or its folder, to tokenize text prompts; for several "
            "models MODEL=PATH,MODEL=PATH; empty: engines tokenize"
        ),
    ] = ""
    drain_s: Annotated[float, about("after SIGTERM: time to finish requests in flight", ge=0)] = (
        30.0
    )

    @property
    def has_remote_prefill(self) -> bool:
        """True if prefill workers are used as soon as there are any."""
        return self.prefill.disaggregation == "auto" and self.mode == "push"


_FILES = ("router_token_file", "router_tls_ca_file", "router_tls_cert_file", "router_tls_key_file")


def load_forward(arguments: Sequence[str], environment: Mapping[str, str]) -> Loaded[ForwardConfig]:
    """Load the settings from flags, environment and file. Raises ConfigError."""
    loaded = load_with_sources(ForwardConfig, arguments, environment, FORWARD_PREFIX)
    config, router = loaded.config, loaded.config.router
    check_security(config, config.security, config.block_keys, loaded.sources)
    for key in _FILES:
        check_readable(key, getattr(router, key))
    check_readable("engine_token_file", config.engines.engine_token_file)
    check_prefill(config.prefill)
    if not is_http_url(router.router_url):
        raise ConfigError("router_url", repr(router.router_url), "http://host:port, or https://…")
    if bool(router.router_tls_cert_file) != bool(router.router_tls_key_file):
        raise ConfigError("router_tls_key_file", "one without the other", "certificate and key")
    return loaded
