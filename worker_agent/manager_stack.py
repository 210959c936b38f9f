"""From a block manager's sets to the stack that moves blocks between them."""

from collections.abc import Mapping

from router.block_errors import StorageError
from worker_agent.block_sets import BlockSet, stored_tier
from worker_agent.blocks.levels import CacheLevel
from worker_agent.manager_config import BlockManagerConfig, Offload, RemoteStore
from worker_agent.offload.policies import All, MinPriorityPrefix, policy_of
from worker_agent.offload.worth import Worth
from worker_agent.tiers.level import Level, StackSettings
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.block_tier import BlockTier


def stack_of(config: BlockManagerConfig, sets: Mapping[CacheLevel, BlockSet]) -> TierStack:
    """The tiers below the device, at work: what a former life left is taken over, and each is
    measured. Raises StorageError.
    """
    offload = config.offload
    remote = [] if config.remote is None else [_remote_level(config, config.remote)]
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
    worth = None if offload.loads_always else Worth(config.model.page_size)
    stack = TierStack([*levels, *remote], settings, worth)
    stack.start()
    return stack


def _remote_level(config: BlockManagerConfig, store: RemoteStore) -> Level:
    try:
        from worker_agent.remote_level import remote_level
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed"
        raise StorageError("G4", reason, "kv-router[redis], or no remote store") from error
    return remote_level(config, store)


def _stored_level(level: CacheLevel, store: BlockTier, offload: Offload) -> Level:
    rule = offload.host_rule if level is CacheLevel.G2 else offload.disk_rule
    policy = policy_of(rule, store.num_blocks)
    if level is CacheLevel.G2 and offload.min_priority:
        policy = All([MinPriorityPrefix(offload.min_priority), policy])
    return Level(level.tier, store, policy)
