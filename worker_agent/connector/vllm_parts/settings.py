"""The settings in `kv_connector_extra_config`: tiers, under the agent's names."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Struct

from router.errors import ConfigError
from router.runtime.http_server.config import HttpServerConfig, LogConfig
from router.runtime.process.loading import checked
from router.runtime.process.settings import about, configured, settings_of
from router.runtime.security.config import BlockKeyConfig, NatsConfig, SecurityConfig
from worker_agent.config.base import AgentBusConfig, AgentConfig, WorkerConfig
from worker_agent.config.tiers import TierSettings, check_tiers

SOURCE = "kv_connector_extra_config"
_OF_AN_AGENT = frozenset({"name", "worker_id", "namespace", "block_key_file"})
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


def connector_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings.

    Raises ConfigError with the key if one is unknown, malformed or contradictory.
    """
    settings = configured(
        ConnectorSettings, **checked(ConnectorSettings, extra, SOURCE, _ELSEWHERE)
    )
    check_tiers(settings, dict.fromkeys(extra, SOURCE))
    sizes = ("host_cache_blocks", "host_cache_gb", "disk_cache_blocks", "disk_cache_gb")
    if not any(getattr(settings.tiers, size) for size in sizes):
        reason = f"no tier in memory or on disk ({SOURCE})"
        raise ConfigError("host_cache_blocks", reason, f"one of {', '.join(sizes)}")
    return settings
