"""Configuration of `kv-router forward`; `--help` prints it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Struct, structs

from router.config.discovery import ClusterConfig
from router.config.openai import (
    CompletionConfig,
    EngineConfig,
    PrefillConfig,
    check_engines,
)
from router.config.picker import PickerConfig, check_picker
from router.errors import ConfigError
from router.protocol.index_service import is_http_url
from router.protocol.subjects import NAMESPACE_PATTERN
from router.runtime.http_server.config import BodyConfig, HttpServerConfig, LogConfig
from router.runtime.process.loading import Loaded, load_with_sources
from router.runtime.process.settings import COMMON, FORWARD_PREFIX, LIVE, about
from router.runtime.security.config import (
    BlockKeyConfig,
    NatsConfig,
    SecurityConfig,
    check_readable,
    check_security,
)
from router.runtime.security.http_access import HttpAccess

if TYPE_CHECKING:  # a forwarder of its own does not import the core
    from router.config.router import RouterConfig


class UpstreamConfig(Struct, frozen=True, kw_only=True):
    """The router, and how it is reached."""

    GROUP: ClassVar[str] = "the router"

    nats_url: Annotated[str, about("NATS server with JetStream", COMMON)] = ""
    router_url: Annotated[str, about("URL of the router; not used with nats_url", COMMON)] = (
        "http://127.0.0.1:8092"
    )
    namespace: Annotated[
        str,
        about(
            "name of the fleet on the bus, with nats_url",
            COMMON,
            pattern=f"^{NAMESPACE_PATTERN}$",
            form="letters, digits, _ and -, at most 64 of them",
        ),
    ] = "default"
    router_token_file: Annotated[
        str, about("file with a token for the router, with the scopes route and admin", COMMON)
    ] = ""
    router_tls_ca_file: Annotated[
        str, about("PEM file of certificate authorities for the router; empty: the system's")
    ] = ""
    router_tls_cert_file: Annotated[str, about("PEM certificate for the router")] = ""
    router_tls_key_file: Annotated[str, about("PEM file of the certificate's private key")] = ""
    max_wait_s: Annotated[
        float,
        about(
            "limit of the wait in the router's queue, and for a worker where there is none",
            COMMON,
            gt=0,
        ),
    ] = 60.0

    @property
    def access(self) -> HttpAccess:
        """Credentials and TLS of the router."""
        return HttpAccess(
            self.router_token_file,
            self.router_tls_ca_file,
            self.router_tls_cert_file,
            self.router_tls_key_file,
        )


class ForwardConfig(Struct, frozen=True, kw_only=True):
    """All settings of a forwarder."""

    GROUP: ClassVar[str] = "listening"

    security: SecurityConfig = SecurityConfig()
    http: HttpServerConfig = HttpServerConfig(http_port=8000)
    bodies: BodyConfig = BodyConfig()
    logs: LogConfig = LogConfig()
    nats: NatsConfig = NatsConfig()
    block_keys: BlockKeyConfig = BlockKeyConfig()
    router: UpstreamConfig = UpstreamConfig()
    completions: CompletionConfig = CompletionConfig()
    engines: EngineConfig = EngineConfig()
    prefill: PrefillConfig = PrefillConfig()
    picker: PickerConfig = PickerConfig()
    max_connections: Annotated[
        int, about("connections of clients; beyond that, 503 and closed", ge=1)
    ] = 8192
    drain_s: Annotated[
        float, about("after SIGTERM: time to finish requests in flight", LIVE, ge=0)
    ] = 30.0

    @property
    def has_remote_prefill(self) -> bool:
        """True if prefill workers are used as soon as there are any."""
        return self.prefill.disaggregation == "auto" and self.completions.mode == "push"


class EppConfig(ForwardConfig, frozen=True, kw_only=True):
    """All settings of the process of an endpoint picker, with its ports by default."""

    cluster: ClusterConfig = ClusterConfig()
    http: HttpServerConfig = HttpServerConfig(http_port=9090)
    picker: PickerConfig = PickerConfig(epp_port=9002, epp_health_port=9003)


_FILES = ("router_token_file", "router_tls_ca_file", "router_tls_cert_file", "router_tls_key_file")


def load_forward(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    config_type: type[ForwardConfig] = ForwardConfig,
) -> Loaded[ForwardConfig]:
    """Load the settings from flags, environment and file. Raises ConfigError."""
    program = "kv-router epp" if config_type is EppConfig else ""
    loaded = load_with_sources(config_type, arguments, environment, FORWARD_PREFIX, program=program)
    config, router = loaded.config, loaded.config.router
    check_security(config, config.security, config.block_keys, loaded.sources)
    for key in _FILES:
        check_readable(key, getattr(router, key))
    check_engines(config.engines, config.prefill)
    check_picker(config.picker)
    _ = config.completions.origins  # raises for an invalid one
    if not is_http_url(router.router_url):
        raise ConfigError("router_url", repr(router.router_url), "http://host:port, or https://…")
    if bool(router.router_tls_cert_file) != bool(router.router_tls_key_file):
        raise ConfigError("router_tls_key_file", "one without the other", "certificate and key")
    return loaded


def in_router(config: "RouterConfig") -> ForwardConfig:
    """Return the settings of the forwarder in a router's process.

    What both have is the router's: address, tokens, certificates, limits, bus, and times.
    """
    openai = config.openai
    return ForwardConfig(
        security=config.security,
        http=structs.replace(config.http, http_port=openai.openai_port),
        bodies=config.bodies,
        logs=config.logs,
        nats=config.nats,
        block_keys=config.block_keys,
        router=UpstreamConfig(
            nats_url=config.bus.nats_url,
            namespace=config.bus.namespace,
            max_wait_s=max(config.queue.max_wait_s, config.queue.no_worker_wait_s),
        ),
        completions=openai.completions,
        engines=openai.engines,
        prefill=openai.prefill,
        picker=config.picker,
        max_connections=config.service.max_connections,
        drain_s=config.service.drain_s,
    )
