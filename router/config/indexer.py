"""Configuration of the standalone index; `kv-router indexer --help` prints it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Struct

from router.config.server import BusConfig, IndexConfig, ServiceConfig
from router.errors import ConfigError
from router.protocol.index_service import is_http_url
from router.runtime.http_server.config import BodyConfig, HttpServerConfig, LogConfig
from router.runtime.process.loading import Loaded, load_with_sources
from router.runtime.process.setting_rules import ConflictRule, check_rules
from router.runtime.process.settings import COMMON, INDEXER_PREFIX, about
from router.runtime.security.config import (
    BlockKeyConfig,
    NatsConfig,
    SecurityConfig,
    check_readable,
    check_security,
)
from router.runtime.security.http_access import HttpAccess

if TYPE_CHECKING:
    from router.core.settings import CoreSettings


class PeerConfig(Struct, frozen=True, kw_only=True):
    """Other indexers, from which ranks without events are loaded at start."""

    GROUP: ClassVar[str] = "other indexers"

    peers: Annotated[
        str | list[str],
        about(
            "URLs of other indexers, comma-separated or a list; at start, ranks "
            "without events are loaded from one of them",
            COMMON,
            unit="URL,…",
        ),
    ] = ""
    max_peers: Annotated[
        int, about("limit of known peers; beyond it, 503", ge=1, le=4096, unit="PEERS")
    ] = 64
    peer_timeout_s: Annotated[
        float, about("timeout of a dump from a peer; then the next peer is tried", gt=0)
    ] = 30.0
    peer_dump_limit_bytes: Annotated[
        int, about("limit of a peer's dump; beyond it, the next peer is tried", ge=1024)
    ] = 256 * 1024 * 1024
    peer_token_file: Annotated[
        str, about("file with a bearer token of scope admin, for peers that require one")
    ] = ""
    peer_tls_ca_file: Annotated[
        str, about("PEM file of certificate authorities for peers; empty: the system's")
    ] = ""
    peer_tls_cert_file: Annotated[str, about("PEM certificate, for peers that require one")] = ""
    peer_tls_key_file: Annotated[str, about("PEM file of the certificate's private key")] = ""

    @property
    def peer_urls(self) -> tuple[str, ...]:
        """The peers to load from, in order."""
        listed = self.peers.split(",") if isinstance(self.peers, str) else self.peers
        return tuple(dict.fromkeys(url.strip() for url in listed if url.strip()))

    @property
    def access(self) -> HttpAccess:
        """Credentials and TLS of the peers."""
        return HttpAccess(
            self.peer_token_file,
            self.peer_tls_ca_file,
            self.peer_tls_cert_file,
            self.peer_tls_key_file,
        )


class IndexerConfig(Struct, frozen=True, kw_only=True):
    """All settings of a standalone index."""

    GROUP: ClassVar[str] = "what caches hold"

    security: SecurityConfig = SecurityConfig()
    http: HttpServerConfig = HttpServerConfig(http_port=8090)
    bodies: BodyConfig = BodyConfig(body_limit_bytes=8 * 1024 * 1024)
    logs: LogConfig = LogConfig()
    nats: NatsConfig = NatsConfig()
    block_keys: BlockKeyConfig = BlockKeyConfig()
    service: ServiceConfig = ServiceConfig()
    bus: BusConfig = BusConfig()
    index: IndexConfig = IndexConfig()
    peers: PeerConfig = PeerConfig()
    frequency_window_s: Annotated[
        float, about("window in which uses of blocks are counted; 0: none are", ge=0)
    ] = 0.0

    @property
    def core(self) -> "CoreSettings":
        """The settings of a core that places and books nothing; only silence matters."""
        from router.core.fleet import LivenessLimits
        from router.core.settings import CoreSettings
        from router.scheduler.settings import PolicySettings
        from router.sequence.hashing.keyed_hashes import HashKeying

        return CoreSettings(
            router_id=0,
            policy=PolicySettings(1.0, 0.0),
            liveness=LivenessLimits(silence_s=self.service.worker_silence_s),
            reservation_ttl_s=0.0,
            max_reservations=0,
            naming=HashKeying(self.block_keys.read()),
        )


PEER_FILES = ("peer_token_file", "peer_tls_ca_file", "peer_tls_cert_file", "peer_tls_key_file")
RULES: tuple[ConflictRule, ...] = (
    ConflictRule(
        "peer_tls_cert_file",
        "peer_tls_key_file",
        lambda c: bool(c.peer_tls_cert_file) and not c.peer_tls_key_file,
        "a certificate needs its private key",
    ),
    ConflictRule(
        "peer_tls_key_file",
        "peer_tls_cert_file",
        lambda c: bool(c.peer_tls_key_file) and not c.peer_tls_cert_file,
        "a private key needs its certificate",
    ),
)


def load_indexer_config(arguments: Sequence[str], environment: Mapping[str, str]) -> IndexerConfig:
    """Load the configuration of a standalone index. Raises ConfigError."""
    return load_indexer(arguments, environment).shown()


def load_indexer(arguments: Sequence[str], environment: Mapping[str, str]) -> Loaded[IndexerConfig]:
    """Load the configuration, and the source of each setting. Raises ConfigError."""
    loaded = load_with_sources(IndexerConfig, arguments, environment, INDEXER_PREFIX)
    config, peers = loaded.config, loaded.config.peers
    check_security(config, config.security, config.block_keys, loaded.sources)
    check_rules(RULES, config, loaded.sources)
    for key in PEER_FILES:
        check_readable(key, getattr(peers, key))
    for url in peers.peer_urls:
        if not is_http_url(url):
            raise ConfigError("peers", f"{url!r}", "http://host:port, or https://…")
    if len(peers.peer_urls) > peers.max_peers:
        problem = f"{len(peers.peer_urls)} of them"
        raise ConfigError("peers", problem, f"at most max_peers, {peers.max_peers}")
    return loaded
