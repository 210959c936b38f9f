"""Configuration of the index alone; `kv-router indexer --help` prints it."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from router.contradictions import Rule, check_rules
from router.core_settings import CoreSettings
from router.errors import ConfigError
from router.fleet import LivenessLimits
from router.process.settings import INDEXER_PREFIX, Loaded, load_with_sources
from router.protocol.registrations import is_http_url
from router.scheduler.settings import PolicySettings
from router.security.config import check_readable, check_security
from router.service_config import ServiceConfig


class IndexerConfig(ServiceConfig, frozen=True, kw_only=True):
    """Everything an index alone can be told."""

    http_port: Annotated[
        int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")
    ] = 8090
    body_limit_bytes: Annotated[
        int, Meta(ge=1024, description="size of a request body; beyond that, 413")
    ] = 8 * 1024 * 1024
    frequency_window_s: Annotated[
        float, Meta(ge=0, description="window in which uses of blocks are counted; 0: they are not")
    ] = 0.0
    peers: Annotated[
        str | list[str],
        Meta(
            description=(
                "URLs of other indexers, comma-separated or a list; at start, they are "
                "asked what ranks hold"
            )
        ),
    ] = ""
    max_peers: Annotated[
        int, Meta(ge=1, le=4096, description="peers known at once; beyond that, 503")
    ] = 64
    peer_timeout_s: Annotated[
        float, Meta(gt=0, description="time for a peer's dump; after that the next peer is asked")
    ] = 30.0
    peer_dump_limit_bytes: Annotated[
        int, Meta(ge=1024, description="size of a peer's dump; beyond that, the next peer is asked")
    ] = 256 * 1024 * 1024

    peer_token_file: Annotated[
        str,
        Meta(description="file with a bearer token of scope admin, for peers that require one"),
    ] = ""
    peer_tls_ca_file: Annotated[
        str, Meta(description="PEM file of certificate authorities for peers; empty: the system's")
    ] = ""
    peer_tls_cert_file: Annotated[
        str, Meta(description="PEM certificate, for peers that require one")
    ] = ""
    peer_tls_key_file: Annotated[
        str, Meta(description="PEM file of the certificate's private key")
    ] = ""

    @property
    def peer_urls(self) -> tuple[str, ...]:
        """Peers to ask, in order."""
        listed = self.peers.split(",") if isinstance(self.peers, str) else self.peers
        return tuple(dict.fromkeys(url.strip() for url in listed if url.strip()))

    @property
    def core(self) -> CoreSettings:
        """Nothing is chosen nor booked here; only silence matters."""
        return CoreSettings(
            router_id=0,
            policy=PolicySettings(1.0, 0.0),
            liveness=LivenessLimits(silence_s=self.worker_silence_s),
            reservation_ttl_s=0.0,
            max_reservations=0,
            naming=self.naming,
        )


PEER_FILES = ("peer_token_file", "peer_tls_ca_file", "peer_tls_cert_file", "peer_tls_key_file")
RULES: tuple[Rule[IndexerConfig], ...] = (
    Rule(
        "peer_tls_cert_file",
        "peer_tls_key_file",
        lambda c: bool(c.peer_tls_cert_file) and not c.peer_tls_key_file,
        "a certificate is proven by its key",
    ),
    Rule(
        "peer_tls_key_file",
        "peer_tls_cert_file",
        lambda c: bool(c.peer_tls_key_file) and not c.peer_tls_cert_file,
        "a key proves a certificate",
    ),
)


def load_indexer_config(arguments: Sequence[str], environment: Mapping[str, str]) -> IndexerConfig:
    """The configuration of an index alone. Raises ConfigError."""
    return load_indexer(arguments, environment).shown()


def load_indexer(arguments: Sequence[str], environment: Mapping[str, str]) -> Loaded[IndexerConfig]:
    """The same, and where each setting comes from. Raises ConfigError."""
    loaded = load_with_sources(IndexerConfig, arguments, environment, INDEXER_PREFIX)
    config = loaded.config
    check_security(config, loaded.sources)
    check_rules(RULES, config, loaded.sources)
    for key in PEER_FILES:
        check_readable(key, getattr(config, key))
    for url in config.peer_urls:
        if not is_http_url(url):
            raise ConfigError("peers", f"{url!r}", "http://host:port, or https://…")
    if len(config.peer_urls) > config.max_peers:
        problem = f"{len(config.peer_urls)} of them"
        raise ConfigError("peers", problem, f"at most max_peers, {config.max_peers}")
    return loaded
