"""The parts of vLLM's configuration that the connector reads, and checks of what it supports.

This module names only the attributes that it reads of vLLM's objects, and imports nothing of vLLM.
"""

import platform
from collections.abc import Collection
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from router.errors import ConfigError, InvalidFieldError
from worker_agent.connector.slots.block_groups import BlockGroup, BlockGroups
from worker_agent.connector.vllm_parts.settings import ConnectorSettings, connector_settings
from worker_agent.manager.config import BlockManagerConfig, CacheModel
from worker_agent.manager.settings import seal_secret, with_lower_tiers


class CacheKinds(Struct, frozen=True):
    """vLLM's specs of the kinds of attention whose blocks the connector can restore."""

    full: Collection[type]
    windows: Collection[type]


class EngineGeometry(Struct, frozen=True, kw_only=True):
    """An engine's blocks, as known to each of its processes."""

    model: str
    """Name of all that determines a block's bytes except its tokens; equal for all workers."""
    groups: tuple[BlockGroup, ...]
    """Its KV cache groups, of which the blocks are equal in bytes."""
    num_blocks: int
    """Number of blocks in the engine's memory, of all groups together."""
    rank: int = 0
    """Rank of the worker among `num_ranks`, each of which has a part of every block."""
    num_ranks: int = 1
    dp_rank: int = 0

    @property
    def number(self) -> int:
        """Return the worker's number among those of all data-parallel ranks."""
        return self.dp_rank * self.num_ranks + self.rank

    @property
    def block_size(self) -> int:
        """Tokens per block of full attention."""
        return BlockGroups(self.groups).full[0][1].block_size


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
        reason = f"{transfer.kv_role!r}, but every engine of this connector stores and loads"
        allowed = "kv_both; prefill engines with share_listen, decode engines with share_peers"
        raise ConfigError("kv_role", reason, allowed)
    if config.speculative_config is not None:
        reason = "a draft's keys and values are written after blocks are stored"
        raise ConfigError("speculative_config", reason, "no --speculative-config")
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, field, 1)
        if size > 1:
            flag = f"--{field.replace('_', '-')}"
            allowed = f"no {flag}: with --tensor-parallel-size each rank stores its part"
            raise ConfigError(field, f"{size}: a block is then spread over ranks", allowed)


def groups_of(cache: Any, kinds: CacheKinds) -> tuple[BlockGroup, ...]:
    """Return the groups of a `KVCacheConfig`. Raises ConfigError for one that cannot be restored.

    Full attention keeps a request's blocks until its end. A window's blocks are those before it,
    which the scheduler half can compute. Of other kinds the blocks to restore are not known to it.
    """
    groups = [_group(f"kv_cache_groups[{i}]", each, kinds)
              for i, each in enumerate(cache.kv_cache_groups)]  # fmt: skip
    if all(group.window for group in groups):
        raise ConfigError("kv_cache_groups", "none of full attention", _WITHOUT_WINDOWS)
    if len(groups) == 1:
        return (replace(groups[0], tag=b""),)
    return tuple(groups)


_WITHOUT_WINDOWS = "full attention; --disable-hybrid-kv-cache-manager makes windows full attention"
_ELSE = "full attention and sliding windows; for other models, no connector"
_ALLOWED = {
    "ChunkedLocalAttentionSpec": _WITHOUT_WINDOWS.replace("windows", "chunks"),
    "SlidingWindowMLASpec": _WITHOUT_WINDOWS,
}
"""The setting that helps with each kind of attention that is refused, where one does."""


def _group(field: str, group: Any, kinds: CacheKinds) -> BlockGroup:
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    if type(spec) not in {*kinds.full, *kinds.windows}:
        raise ConfigError(field, f"{kind}, which is not restored", _ALLOWED.get(kind, _ELSE))
    if group.is_eagle_group:
        raise ConfigError(field, f"{kind} of draft layers", "no speculative decoding")
    if group.host_resident or not group.enable_kv_transfer or not spec.prefix_cacheable:
        raise ConfigError(field, f"{kind} that vLLM does not cache by prefix", _ELSE)
    window = spec.sliding_window if type(spec) in kinds.windows else None
    if window is not None and spec.extra_retained_tokens:
        raise ConfigError(field, f"{kind} with tokens of a draft", "no speculative decoding")
    about = (kind, window, spec.block_size, *group.layer_names)
    return BlockGroup(spec.block_size, window, "\n".join(map(str, about)).encode())


def engine_geometry(
    config: Any, cache: Any, groups: tuple[BlockGroup, ...], settings: ConnectorSettings
) -> EngineGeometry:
    """Return the engine facts for either half. Raises ConfigError for settings it contradicts."""
    parallel = config.parallel_config
    geometry = EngineGeometry(
        model=_model(config, cache, settings),
        groups=groups,
        num_blocks=cache.num_blocks,
        rank=parallel.rank,
        num_ranks=parallel.world_size,
        dp_rank=parallel.data_parallel_rank,
    )
    if settings.layer_by_layer and len(groups) > 1:
        reason = f"{len(groups)} groups of layers, which share memory"
        raise ConfigError("layer_by_layer", reason, "false, with this model")
    unit = BlockGroups(groups).unit
    if settings.tier_events and geometry.block_size != unit:
        reason = f"full attention has blocks of {geometry.block_size} tokens, a window of {unit}"
        raise ConfigError("tier_events", reason, "none, with these blocks")
    return geometry


def _model(config: Any, cache: Any, settings: ConnectorSettings) -> str:
    """Return a name for all that determines a block's bytes, except its tokens.

    Kernels choose the layout within a block. Therefore the attention backend, the machine and the
    order that vLLM has settled on (NHD, HND: `VLLM_KV_CACHE_LAYOUT`) are part of the name.
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
        f"{cache.kv_cache_layout}",
        _machine(),
    )
    return "/".join(parts)


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
