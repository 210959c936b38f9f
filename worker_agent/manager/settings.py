"""Conversion of an agent's settings to the block manager's, for one rank."""

import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes, token_hex

from router.errors import ConfigError
from router.runtime.kernels.hash_key import BlockKey
from router.runtime.own_files import open_own
from router.runtime.security.redis_access import RedisAccess
from worker_agent.config.base import WorkerConfig
from worker_agent.config.reference import EngineSettings, ReferenceConfig
from worker_agent.config.tiers import TierSettings, blocks_of
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.config import (
    BlockManagerConfig,
    CacheModel,
    InFile,
    Offload,
    OnDevice,
    OnHost,
    Place,
    RemoteStore,
    RuntimeConfig,
    Shared,
    TierLayout,
)
from worker_agent.storage.mapped_file import kept_path

SECRET_BYTES = 32


def manager_config(config: ReferenceConfig, dp_rank: int, device: str) -> BlockManagerConfig:
    """Return the settings of all tiers of a rank, with device blocks on a torch device."""
    layout = TierLayout(
        num_blocks=config.engine.num_blocks,
        place=OnDevice(device),
        kind=LayoutKind(config.engine.kv_layout),
    )
    worker = config.worker
    model, stem = cache_model(config.engine), f"kv-{worker.id}-{dp_rank}"
    secret = seal_secret(config.block_keys.read())
    return with_lower_tiers(config.tiers, worker, model, stem, secret, layout)


def with_lower_tiers(
    config: TierSettings,
    worker: WorkerConfig,
    model: CacheModel,
    stem: str,
    secret: bytes,
    device: TierLayout | None = None,
) -> BlockManagerConfig:
    """Return the tiers below the device, and the device's, if the agent owns it.

    `stem`: the prefix of the file names. `secret`: of `seal_secret`.
    """
    block_bytes = model.layout(1, 1).block_bytes
    host = blocks_of(config.host_cache_blocks, config.host_cache_gb, block_bytes)
    disk = blocks_of(config.disk_cache_blocks, config.disk_cache_gb, block_bytes)
    return BlockManagerConfig(
        runtime=RuntimeConfig(worker_id=worker.id),
        model=model,
        device=device,
        host=TierLayout(num_blocks=host, place=_host(config, stem)) if host else None,
        disk=TierLayout(num_blocks=disk, place=_disk(config, stem)) if disk else None,
        remote=_remote(config, worker.namespace, secret),
        offload=Offload(
            batch_blocks=config.offload_batch_blocks,
            max_waiting_blocks=config.offload_waiting_blocks,
            store_bytes_per_s=config.offload_bytes_per_s,
            min_priority=config.offload_min_priority,
            host_rule=config.host_offload_policy,
            disk_rule=config.disk_offload_policy,
            remote_rule=config.remote_offload_policy,
            drain_s=config.offload_drain_s,
            adopt_timeout_s=config.adopt_timeout_s,
            loads_always=config.onboard_always,
        ),
    )


def seal_secret(key: BlockKey | None) -> bytes:
    """Return the secret of seals in a shared store, empty without a key of the fleet."""
    return b"" if key is None else derived_secret(key, b"kv seals")


def cache_secret(config: TierSettings, worker_id: int, key: BlockKey | None) -> bytes:
    """Return the secret under which blocks are named inside. Raises ConfigError.

    It is derived from the fleet's key, if there is one, so that workers can share a store; else it
    is read from a file next to the tiers that outlive the agent; else it is random and only of this
    process.
    """
    if key is not None:
        return derived_secret(key, b"kv cache")
    directory = config.disk_cache_dir or config.host_cache_dir
    if not directory:
        return token_bytes(SECRET_BYTES)
    return _kept_secret(Path(directory) / f"kv-{worker_id}.secret")


def derived_secret(key: BlockKey, purpose: bytes) -> bytes:
    """Return the fleet's secret for one purpose, of up to 16 bytes."""
    pair = key.low.to_bytes(8, "little") + key.high.to_bytes(8, "little")
    return blake2b(pair, digest_size=SECRET_BYTES, person=purpose).digest()


def _kept_secret(path: Path) -> bytes:
    try:
        try:
            descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            with open(path, "rb", opener=open_own) as file:
                secret = file.read()
        else:
            secret = token_bytes(SECRET_BYTES)
            with os.fdopen(descriptor, "wb") as created:
                created.write(secret)
    except OSError as error:
        allowed = "a directory to write in, without such a file of another user"
        raise ConfigError("disk_cache_dir", f"{path}: {error.strerror}", allowed) from error
    if len(secret) != SECRET_BYTES:
        reason = f"{path} has {len(secret)} bytes"
        raise ConfigError("disk_cache_dir", reason, f"{SECRET_BYTES}, or no such file")
    return secret


def cache_model(config: EngineSettings) -> CacheModel:
    """Return the description of a block of the engine's model."""
    head_dim = config.hidden_size // config.num_heads
    weights = f"{config.model_name}/{config.seed}/{config.hidden_size}/{config.num_heads}"
    order = "" if config.kv_page == "nhd" else f"/{config.kv_page}"
    return CacheModel(
        num_layers=config.num_layers,
        page_size=config.block_size,
        inner_dim=config.num_kv_heads * head_dim,
        dtype="float32",
        num_heads=config.num_kv_heads,
        name=f"{weights}{order}",
    )


def _host(config: TierSettings, stem: str) -> Place:
    if config.host_cache_dir:
        return Shared(kept_path(Path(config.host_cache_dir), stem, ".host"))
    return OnHost()


def _disk(config: TierSettings, stem: str) -> Place:
    is_kept = bool(config.disk_cache_dir)
    folder = Path(config.disk_cache_dir or tempfile.gettempdir())
    return InFile(
        kept_path(folder, stem, ".blocks") if is_kept else folder / f"{stem}-{token_hex(8)}.blocks",
        zero_fill=config.disk_zero_fill,
        is_kept=is_kept,
        is_direct=config.disk_direct,
    )


def _remote(config: TierSettings, namespace: str, secret: bytes) -> RemoteStore | None:
    if not config.remote_cache_url:
        return None
    return RemoteStore(
        url=config.remote_cache_url,
        access=RedisAccess(config.remote_cache_username, config.remote_cache_password_file),
        max_blocks=config.remote_cache_blocks,
        namespace=namespace,
        secret=secret,
        ttl_s=config.remote_cache_ttl_s,
    )
