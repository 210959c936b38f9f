"""The parts of vLLM's configuration that the connector reads, and checks of what it supports.

This module names only the attributes that it reads of vLLM's objects, and imports nothing of vLLM.
"""

import platform
from typing import Any

import torch
from msgspec import Struct

from router.errors import ConfigError, InvalidFieldError
from worker_agent.connector.vllm_parts.settings import ConnectorSettings, connector_settings
from worker_agent.manager.config import BlockManagerConfig, CacheModel
from worker_agent.manager.settings import seal_secret, with_lower_tiers


class EngineGeometry(Struct, frozen=True, kw_only=True):
    """An engine with one kind of block, as known to each of its processes."""

    model: str
    """Name of all that determines a block's bytes except its tokens; equal for all workers."""
    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Number of blocks in the engine's memory."""
    rank: int = 0
    """Rank of the worker among `num_ranks`, each of which has a part of every block."""
    num_ranks: int = 1
    dp_rank: int = 0


def tiers_of(
    settings: ConnectorSettings, facts: EngineGeometry, block_bytes: int
) -> BlockManagerConfig:
    """Return the configuration of a worker's tiers. Raises InvalidFieldError.

    `block_bytes`: size of the worker's part of a block.
    """
    inner, odd = divmod(block_bytes, facts.block_size)
    if odd:
        allowed = f"a multiple of {facts.block_size} tokens"
        raise InvalidFieldError("block_bytes", f"{block_bytes}", allowed)
    part = f"{facts.model}/{facts.rank} of {facts.num_ranks}"
    model = CacheModel(
        num_layers=1,
        outer_dim=1,
        page_size=facts.block_size,
        inner_dim=inner,
        dtype="uint8",
        name=part,
    )
    stem = f"kv-{settings.worker.id}-{facts.dp_rank}-{facts.rank}"
    secret = seal_secret(settings.block_keys.read())
    return with_lower_tiers(settings.tiers, settings.worker, model, stem, secret)


_RECOMPUTE = "recompute"


def settings_of(config: Any) -> ConnectorSettings:
    """Return the tiers' settings from a `VllmConfig`.

    Raises ConfigError if they, or the engine's settings, are not supported.
    """
    check_engine(config)
    return connector_settings(config.kv_transfer_config.kv_connector_extra_config)


def check_engine(config: Any) -> None:
    """Raise ConfigError for an engine with which blocks could be wrong or useless."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer.kv_load_failure_policy != _RECOMPUTE:
        value = f"{transfer.kv_load_failure_policy!r}, with which a failed load fails its request"
        raise ConfigError("kv_load_failure_policy", value, _RECOMPUTE)
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
    """Raise ConfigError for several KV cache groups, or a kind of which blocks are freed singly."""
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        allowed = "1; for most models --disable-hybrid-kv-cache-manager sets this"
        raise ConfigError("kv_cache_groups", f"{len(groups)}", allowed)
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, full_attention):
        raise ConfigError("kv_cache_spec", type(spec).__name__, full_attention.__name__)


def engine_geometry(config: Any, cache: Any, settings: ConnectorSettings) -> EngineGeometry:
    """Return the engine facts for either half."""
    parallel = config.parallel_config
    return EngineGeometry(
        model=_model(config, settings),
        block_size=cache.kv_cache_groups[0].kv_cache_spec.block_size,
        num_blocks=cache.num_blocks,
        rank=parallel.rank,
        num_ranks=parallel.world_size,
        dp_rank=parallel.data_parallel_rank,
    )


def _model(config: Any, settings: ConnectorSettings) -> str:
    """Return a name for all that determines a block's bytes, except its tokens.

    Kernels choose the layout within a block. Therefore the attention backend and the machine are
    part of the name.
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
