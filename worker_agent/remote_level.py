"""The store that workers share, as a tier. Only here is Redis's client loaded."""

import time
from collections.abc import Sequence

from router.protocol.values import Tier
from worker_agent.blocks.names import BlockName
from worker_agent.manager_config import BlockManagerConfig, RemoteStore
from worker_agent.offload.policies import policy_of
from worker_agent.storage.remote import RemoteSettings, RemoteStorage, redis_client
from worker_agent.tiers.level import Level
from worker_agent.transfer.block_tier import BlockTier
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.remote_tier import RemoteTier

PATIENCE = 10
"""Times the client's timeout, which is for each piece of an answer, the whole of one may take."""


def remote_level(config: BlockManagerConfig, store: RemoteStore) -> Level:
    """Blocks of this model, by whichever worker."""
    settings = RemoteSettings(
        namespace=store.namespace,
        fingerprint=f"{config.model.fingerprint:016x}",
        owner=f"{config.runtime.worker_id}-{time.time_ns():x}",
        block_bytes=config.model.layout(1, 1).block_bytes,
        max_blocks=store.max_blocks,
        ttl_s=store.ttl_s,
    )
    client = redis_client(store.url, store.timeout_s)
    io = IoThreads("redis", PATIENCE * store.timeout_s)
    tier = RemoteTier(RemoteStorage(client, settings), settings, io=io)
    policy = policy_of(config.offload.remote_rule, store.max_blocks)
    return Level(Tier.REMOTE, tier, policy, is_shared=True)


def found_in(tier: BlockTier, names: Sequence[BlockName]) -> int:
    """Look for blocks in a store that workers share, for that tier's thread: those that are there
    are told as stored. How many.
    """
    return tier.find(names) if isinstance(tier, RemoteTier) else 0
