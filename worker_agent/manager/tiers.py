"""Construction of the tiers of a block manager, the remote store included."""

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from router.protocol.values import Tier
from worker_agent.blocks.names import BlockName, CacheLevel
from worker_agent.manager.config import BlockManagerConfig, Offload, RemoteStore
from worker_agent.manager.tier_blocks import BlockSet, stored_tier
from worker_agent.offload.load_or_recompute import LoadOrRecompute
from worker_agent.offload.policies import All, MinPriorityPrefix, policy_of
from worker_agent.storage.remote import RemoteSettings, RemoteStorage, redis_client
from worker_agent.tiers.level import Level, StackSettings
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.block_tier import BlockTier
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.remote_tier import RemoteTier

PATIENCE = 10
"""The total timeout of a response, as a multiple of the client's, which is for each piece."""


def remote_level(config: BlockManagerConfig, store: RemoteStore) -> Level:
    """Return the tier with the blocks of this model, of any worker."""
    settings = RemoteSettings(
        namespace=store.namespace,
        fingerprint=_fingerprint(config, store),
        owner=f"{config.runtime.worker_id}-{time.time_ns():x}",
        block_bytes=config.model.layout(1, 1).block_bytes,
        max_blocks=store.max_blocks,
        ttl_s=store.ttl_s,
    )
    client = redis_client(store.url, store.timeout_s, store.access)
    io = IoThreads("redis", PATIENCE * store.timeout_s)
    tier = RemoteTier(RemoteStorage(client, settings), settings, secret=store.secret, io=io)
    policy = policy_of(config.offload.remote_rule, store.max_blocks)
    return Level(Tier.REMOTE, tier, policy, is_shared=True)


def _fingerprint(config: BlockManagerConfig, store: RemoteStore) -> str:
    """Return what the blocks of one store have in common: their format and their secret."""
    model = f"{config.model.fingerprint:016x}"
    if not store.secret:
        return model
    secret = blake2b(store.secret, digest_size=8, person=b"kv seals id").hexdigest()
    return f"{model}-{secret}"


def found_in(tier: BlockTier, names: Sequence[BlockName]) -> int:
    """Look up blocks in a store that workers share, and report existing ones as stored.

    Returns their number. To be called on that tier's thread.
    """
    return tier.find(names) if isinstance(tier, RemoteTier) else 0


def stack_of(config: BlockManagerConfig, sets: Mapping[CacheLevel, BlockSet]) -> TierStack:
    """Return the started tiers below the device.

    Blocks of an earlier process are recovered, and each tier is measured. Raises StorageError.
    """
    offload = config.offload
    remote = [] if config.remote is None else [remote_level(config, config.remote)]
    levels = [
        _stored_level(level, stored_tier(each, offload.batch_blocks), offload)
        for level, each in sets.items()
        if level is not CacheLevel.G1
    ]
    settings = StackSettings(
        config.model.layout(1, 1).block_bytes,
        batch_blocks=offload.batch_blocks,
        max_waiting_blocks=offload.max_waiting_blocks,
        store_bytes_per_s=offload.store_bytes_per_s,
        adopt_timeout_s=offload.adopt_timeout_s,
        drain_s=offload.drain_s,
    )
    worth = None if offload.loads_always else LoadOrRecompute(config.model.page_size)
    stack = TierStack([*levels, *remote], settings, worth)
    stack.start()
    return stack


def _stored_level(level: CacheLevel, store: BlockTier, offload: Offload) -> Level:
    rule = offload.host_rule if level is CacheLevel.G2 else offload.disk_rule
    policy = policy_of(rule, store.num_blocks)
    if level is CacheLevel.G2 and offload.min_priority:
        policy = All([MinPriorityPrefix(offload.min_priority), policy])
    return Level(level.tier, store, policy)
