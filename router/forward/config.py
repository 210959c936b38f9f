"""Configuration of `kv-router forward`; `--help` prints it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from router.errors import ConfigError
from router.forward.prefill_config import PrefillConfig, check_prefill
from router.http_client import PoolLimits
from router.process.settings import FORWARD_PREFIX, Loaded, load_with_sources
from router.protocol.registrations import is_http_url
from router.protocol.subjects import NAMESPACE_PATTERN
from router.security.config import check_readable, check_security
from router.security.http_access import HttpAccess


class ForwardConfig(PrefillConfig, frozen=True, kw_only=True):
    """Everything a process that forwards can be told."""

    router_url: Annotated[str, Meta(description="router to ask; not used if nats_url is set")] = (
        "http://127.0.0.1:8092"
    )
    namespace: Annotated[
        str,
        Meta(
            pattern=f"^{NAMESPACE_PATTERN}$",
            description="name of the fleet on the bus, with nats_url",
        ),
    ] = "default"
    router_token_file: Annotated[
        str, Meta(description="file with a token for the router, with the scopes route and admin")
    ] = ""
    router_tls_ca_file: Annotated[
        str,
        Meta(
            description=("PEM file of certificate authorities for the router; empty: the system's")
        ),
    ] = ""
    router_tls_cert_file: Annotated[str, Meta(description="PEM certificate for the router")] = ""
    router_tls_key_file: Annotated[
        str, Meta(description="PEM file of the certificate's private key")
    ] = ""
    routing_group: Annotated[str, Meta(min_length=1, description="routing group to use")] = (
        "default"
    )
    mode: Annotated[
        Literal["push", "direct"],
        Meta(
            description=(
                "push: to the worker that the router chooses; direct: to the one that "
                "the request names"
            )
        ),
    ] = "push"
    http_port: Annotated[
        int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")
    ] = 8000
    engine_token_file: Annotated[
        str, Meta(description="file with a token for the engines, instead of the client's own")
    ] = ""
    body_limit_bytes: Annotated[
        int, Meta(ge=1024, description="size of a request body; beyond that, 413")
    ] = 32 * 1024 * 1024
    bodies_limit_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="size of all bodies of requests in flight together; beyond that, 503",
        ),
    ] = 2 * 1024 * 1024 * 1024
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="time to receive a body; beyond that, 408")
    ] = 30.0
    max_connections: Annotated[
        int, Meta(ge=1, description="connections of clients; beyond that, 503 and closed")
    ] = 8192
    engine_connections: Annotated[
        int,
        Meta(ge=1, description="connections to each engine; beyond that, another worker is tried"),
    ] = 2048
    connect_timeout_s: Annotated[
        float,
        Meta(gt=0, description="time to connect to an engine; after that another worker is tried"),
    ] = 3.0
    first_byte_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "time for an engine to begin its answer; after that another worker is tried"
            ),
        ),
    ] = 600.0
    idle_timeout_s: Annotated[
        float,
        Meta(gt=0, description="an answer without new data for this long counts as broken off"),
    ] = 120.0
    answer_limit_bytes: Annotated[
        int, Meta(ge=1024, description="size of an answer that is not a stream; beyond that, 502")
    ] = 64 * 1024 * 1024
    max_attempts: Annotated[int, Meta(ge=1, le=64, description="workers tried for one request")] = 3
    max_migrations: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="how often a stream may be continued on another worker; 0: never",
        ),
    ] = 2
    breaker_failures: Annotated[
        int, Meta(ge=1, description="failures in a row after which a worker is avoided for a while")
    ] = 5
    breaker_open_s: Annotated[
        float,
        Meta(gt=0, description="how long it is avoided at first; doubled by each failed probe"),
    ] = 5.0
    known_tokens: Annotated[
        int, Meta(ge=0, description="size of the cache of tokenized prompts, in tokens")
    ] = 8_000_000
    tokenizer: Annotated[
        str,
        Meta(
            description=(
                "tokenizer.json or its folder, to tokenize text prompts; for several "
                "models MODEL=PATH,MODEL=PATH; empty: engines are asked"
            )
        ),
    ] = ""
    probe_interval_s: Annotated[
        float,
        Meta(
            ge=0,
            description="time between health probes of each worker; 0: only failed ones are probed",
        ),
    ] = 10.0
    max_wait_s: Annotated[
        float, Meta(gt=0, description="how long a request may wait in the router's queue")
    ] = 60.0
    drain_s: Annotated[
        float, Meta(ge=0, description="after SIGTERM: time to finish answers that have begun")
    ] = 30.0

    @property
    def pool_limits(self) -> PoolLimits:
        """Of connections to engines."""
        return PoolLimits(
            self.engine_connections, self.connect_timeout_s, self.first_byte_timeout_s
        )

    @property
    def router_access(self) -> HttpAccess:
        """How to log in to the router."""
        return HttpAccess(
            self.router_token_file,
            self.router_tls_ca_file,
            self.router_tls_cert_file,
            self.router_tls_key_file,
        )


_FILES = ("router_token_file", "router_tls_ca_file", "router_tls_cert_file", "router_tls_key_file",
          "engine_token_file")  # fmt: skip


def load_forward(arguments: Sequence[str], environment: Mapping[str, str]) -> Loaded[ForwardConfig]:
    """From flags, environment and file. Raises ConfigError."""
    loaded = load_with_sources(ForwardConfig, arguments, environment, FORWARD_PREFIX)
    config = loaded.config
    check_security(config, loaded.sources)
    for key in _FILES:
        check_readable(key, getattr(config, key))
    check_prefill(config)
    if not is_http_url(config.router_url):
        raise ConfigError("router_url", repr(config.router_url), "http://host:port, or https://…")
    if bool(config.router_tls_cert_file) != bool(config.router_tls_key_file):
        raise ConfigError("router_tls_key_file", "one without the other", "certificate and key")
    return loaded
