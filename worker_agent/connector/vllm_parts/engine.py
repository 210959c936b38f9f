"""What the connector reads of vLLM's configuration, and what of it it cannot serve.

Only what is read of vLLM's objects is named here; nothing of it is imported.
"""

import platform
from typing import Any

import torch

from router.errors import ConfigError
from worker_agent.connector.vllm_parts.facts import EngineFacts
from worker_agent.connector.vllm_parts.settings import ConnectorSettings, connector_settings

_RECOMPUTE = "recompute"


def settings_of(config: Any) -> ConnectorSettings:
    """What a `VllmConfig` says of the tiers.

    Raises ConfigError for what is wrong with that, or with the engine.
    """
    check_engine(config)
    return connector_settings(config.kv_transfer_config.kv_connector_extra_config)


def check_engine(config: Any) -> None:
    """Raises ConfigError for an engine under which blocks could be wrong, or of no use."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer.kv_load_failure_policy != _RECOMPUTE:
        said = f"{transfer.kv_load_failure_policy!r}, by which a request fails with its load"
        raise ConfigError("kv_load_failure_policy", said, _RECOMPUTE)
    if transfer.kv_role != "kv_both":
        raise ConfigError("kv_role", repr(transfer.kv_role), "kv_both")
    if config.speculative_config is not None:
        reason = "a draft's keys and values are written after blocks are stored"
        raise ConfigError("speculative_config", reason, "none, with this connector")
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, field, 1)
        if size > 1:
            raise ConfigError(field, f"{size}: a block is then spread over ranks", "1")


def check_cache(cache: Any, full_attention: type) -> None:
    """Raises ConfigError for blocks of several kinds, or such as the engine gives up one by one."""
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        allowed = "1; for most models --disable-hybrid-kv-cache-manager makes it so"
        raise ConfigError("kv_cache_groups", f"{len(groups)}", allowed)
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, full_attention):
        raise ConfigError("kv_cache_spec", type(spec).__name__, full_attention.__name__)


def engine_facts(config: Any, cache: Any, settings: ConnectorSettings) -> EngineFacts:
    """Of either half."""
    parallel = config.parallel_config
    return EngineFacts(
        model=_model(config, settings),
        block_size=cache.kv_cache_groups[0].kv_cache_spec.block_size,
        num_blocks=cache.num_blocks,
        rank=parallel.rank,
        num_ranks=parallel.world_size,
        dp_rank=parallel.data_parallel_rank,
    )


def _model(config: Any, settings: ConnectorSettings) -> str:
    """Whatever the bytes of a block depend on but its tokens. Kernels pack blocks as they like: so
    does the machine count, and the engine's version.
    """
    model, parallel = config.model_config, config.parallel_config
    parts = (
        settings.cache_model or f"{model.model}@{model.revision}",
        f"{model.dtype}",
        f"{model.quantization}",
        f"{config.cache_config.cache_dtype}",
        f"{config.cache_config.block_size}",
        f"tp{parallel.tensor_parallel_size}",
        f"pp{parallel.pipeline_parallel_size}",
        f"{config.attention_config.backend}",
        _machine(),
    )
    return "/".join(parts)


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
