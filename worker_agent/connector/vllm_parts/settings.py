"""The settings in `kv_connector_extra_config`: tiers, under the agent's names, and peers."""

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from msgspec import Struct

from router.errors import ConfigError
from router.runtime.http_server.config import HttpServerConfig, LogConfig
from router.runtime.process.loading import checked
from router.runtime.process.setting_rules import ConflictRule, check_rules
from router.runtime.process.settings import about, configured, settings_of
from router.runtime.security.config import (
    CERTIFICATE_RULES,
    BlockKeyConfig,
    NatsConfig,
    SecurityConfig,
    check_readable,
)
from worker_agent.config.base import AgentBusConfig, AgentConfig, WorkerConfig, listed
from worker_agent.config.sharing import no_nixl_with, rank_address
from worker_agent.config.tiers import TierSettings, check_tiers

SOURCE = "kv_connector_extra_config"
_OF_AN_AGENT = frozenset(
    {"name", "worker_id", "namespace", "block_key_file", "tls_cert_file", "tls_key_file"}
)
"""Settings of an agent that apply here too."""
_ELSEWHERE = {
    each.name: "for an agent: kv-worker-agent"
    for section in (
        SecurityConfig,
        HttpServerConfig,
        LogConfig,
        NatsConfig,
        BlockKeyConfig,
        AgentConfig,
        AgentBusConfig,
    )
    for each in settings_of(section())
    if each.name not in _OF_AN_AGENT
}


class ConnectorSettings(Struct, frozen=True, kw_only=True):
    """Tiers of an engine's workers, each of which has its own."""

    worker: WorkerConfig = WorkerConfig()
    block_keys: BlockKeyConfig = BlockKeyConfig()
    tiers: TierSettings = TierSettings()
    cache_model: Annotated[
        str, about("model name of stored blocks; empty: the engine's model and revision")
    ] = ""
    tier_events: Annotated[
        str,
        about(
            "address from which the agent beside the engine (its --tiers) receives the "
            "tiers' contents: tcp://host:port, data-parallel rank r at port + r; empty: none"
        ),
    ] = ""
    share_listen: Annotated[
        str,
        about(
            "address at which other engines read blocks from host memory: tcp://host:port, "
            "worker r of data-parallel rank d at port + n, n = d × workers of a rank + r, or "
            "unix:///path on one host, with -n; empty: none. Needs block_key_file"
        ),
    ] = ""
    share_peers: Annotated[
        str | list[str],
        about(
            "share_listen of other engines with the same model and ranks, separated by commas or "
            "a list: blocks that are in none of our tiers are loaded from theirs"
        ),
    ] = ""

    tls_cert_file: Annotated[
        str,
        about(
            "PEM certificate (chain) of share_listen's host, which tcp:// is then encrypted with, "
            "and other engines are expected to have; read again when it changes"
        ),
    ] = ""
    tls_key_file: Annotated[str, about("PEM file of the certificate's private key")] = ""
    share_ca_file: Annotated[
        str,
        about(
            "PEM file of certificate authorities for other engines, of which tcp:// is then "
            "encrypted; empty, with tls_cert_file: the system's"
        ),
    ] = ""
    share_nixl: Annotated[
        bool,
        about(
            "read memory of engines on other hosts through NIXL, by RDMA where the network has it, "
            "and let theirs read ours; else over the socket. NIXL opens ports without "
            "authentication: for closed networks. Needs share_listen or share_peers"
        ),
    ] = False

    control_listen: Annotated[
        str,
        about(
            "address at which the agent beside the engine (its --control-listen) sends commands to "
            "the tiers: tcp://127.0.0.1:port or unix:///path, for each worker as share_listen; "
            "empty: none"
        ),
    ] = ""

    layer_by_layer: Annotated[
        bool,
        about(
            "copy each layer's blocks once it is computed, and await each before it is computed; "
            "with one kind of attention. CUDA graphs are then in pieces"
        ),
    ] = False

    @property
    def finds_peers(self) -> bool:
        """True if blocks are looked for at other engines, whether named here or by the agent."""
        return bool(self.peers or (self.share_listen and self.control_listen))

    @property
    def has_tls(self) -> bool:
        """True if blocks go over TCP with TLS alone."""
        return bool(self.tls_cert_file or self.share_ca_file)

    @property
    def peers(self) -> list[str]:
        """The addresses in `share_peers`."""
        return listed(self.share_peers)


MAX_PEERS = 32
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def _only_keyed(key: str) -> ConflictRule:
    return ConflictRule(
        key,
        "block_key_file",
        lambda c: bool(getattr(c, key)) and not (c.block_key_file or c.block_key),
        "engines that share blocks name them, and prove themselves, by the fleet's secret",
    )


_RULES = (
    _only_keyed("share_listen"),
    _only_keyed("share_peers"),
    ConflictRule(
        "share_nixl",
        "share_listen",
        lambda c: c.share_nixl and not (c.share_listen or c.share_peers),
        "blocks are not shared",
    ),
    *CERTIFICATE_RULES,
    ConflictRule(
        "tls_cert_file",
        "share_listen",
        lambda c: c.tls_cert_file and not c.share_listen,
        "there is no server to prove",
    ),
    ConflictRule(
        "share_ca_file",
        "share_listen",
        lambda c: c.share_ca_file and not (c.share_listen or c.share_peers),
        "blocks are not shared",
    ),
    ConflictRule(
        "share_ca_file",
        "tls_cert_file",
        lambda c: c.share_ca_file and c.share_listen and not c.tls_cert_file,
        "our own blocks would be sent without TLS",
    ),
    no_nixl_with("tls_cert_file"),
    no_nixl_with("share_ca_file"),
)


def _check_control(address: str) -> None:
    """Raise ConfigError unless only processes of this host, or pod, can send commands."""
    at = urlsplit(rank_address("control_listen", address, 0))
    if at.scheme == "tcp" and at.hostname not in _LOOPBACK:
        reason = f"{at.hostname} can be reached from other hosts"
        raise ConfigError("control_listen", reason, "tcp://127.0.0.1:port or unix:///path")


def _check_sharing(settings: ConnectorSettings, sources: Mapping[str, str]) -> None:
    """Raise ConfigError for settings of sharing that are malformed or contradictory."""
    check_rules(_RULES, settings, sources)
    for key in ("tls_cert_file", "tls_key_file", "share_ca_file"):
        check_readable(key, getattr(settings, key))
    if settings.share_listen:
        rank_address("share_listen", settings.share_listen, 0)
    for address in settings.peers:
        rank_address("share_peers", address, 0)
    tiers = settings.tiers
    if settings.share_listen and not (tiers.host_cache_blocks or tiers.host_cache_gb):
        reason = "no host memory to share: blocks on disk are not"
        raise ConfigError("share_listen", reason, "host_cache_blocks or host_cache_gb as well")
    if len(settings.peers) > MAX_PEERS:
        raise ConfigError("share_peers", f"{len(settings.peers)} of them", f"at most {MAX_PEERS}")


def connector_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings.

    Raises ConfigError with the key if one is unknown, malformed or contradictory.
    """
    settings = configured(
        ConnectorSettings, **checked(ConnectorSettings, extra, SOURCE, _ELSEWHERE)
    )
    sources = dict.fromkeys(extra, SOURCE)
    check_tiers(settings, sources)
    _check_sharing(settings, sources)
    if settings.control_listen:
        _check_control(settings.control_listen)
    sizes = ("host_cache_blocks", "host_cache_gb", "disk_cache_blocks", "disk_cache_gb")
    if not any(getattr(settings.tiers, size) for size in sizes):
        reason = f"no tier in memory or on disk ({SOURCE})"
        raise ConfigError("host_cache_blocks", reason, f"one of {', '.join(sizes)}")
    return settings
