"""What a user may say in `kv_connector_extra_config`: tiers, under the agent's names of them."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import fields

from router.errors import ConfigError
from router.process.settings import checked
from worker_agent.common_config import AgentConfig
from worker_agent.tier_settings import TierSettings, check_tiers

SOURCE = "kv_connector_extra_config"
_OF_AN_AGENT = frozenset({"name", "worker_id", "namespace", "block_key_file"})
"""Settings of an agent that make sense here, too."""
_ELSEWHERE = {
    field.name: "for an agent: kv-worker-agent"
    for field in fields(AgentConfig)
    if field.name not in _OF_AN_AGENT
}


class ConnectorSettings(TierSettings, frozen=True, kw_only=True):
    """Tiers of an engine's workers, each of which has its own."""

    cache_model: Annotated[
        str,
        Meta(description="what blocks are kept under; by default the engine's model and revision"),
    ] = ""
    tier_events: Annotated[
        str,
        Meta(
            description="where the agent beside the engine hears what tiers hold (its --tiers): "
            "tcp://host:port, data-parallel rank r at the port + r; empty: nowhere"
        ),
    ] = ""


def connector_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Raises ConfigError, naming the key, for what is unknown, malformed or contradictory."""
    settings = ConnectorSettings(**checked(ConnectorSettings, extra, SOURCE, _ELSEWHERE))
    check_tiers(settings, dict.fromkeys(extra, SOURCE))
    sizes = ("host_cache_blocks", "host_cache_gb", "disk_cache_blocks", "disk_cache_gb")
    if not any(getattr(settings, size) for size in sizes):
        reason = f"no tier in memory or on disk ({SOURCE})"
        raise ConfigError("host_cache_blocks", reason, f"one of {', '.join(sizes)}")
    return settings
