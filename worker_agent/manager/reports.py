"""Reports of a rank's tiers, readable on any thread without waiting for a tier."""

from collections.abc import Iterator, Sequence

from router.sequence.hashing.keyed_hashes import HashKeying
from worker_agent.blocks.names import BlockName, CacheLevel, level_of
from worker_agent.blocks.pool_values import PoolStatus
from worker_agent.manager.manager import KvBlockManager
from worker_agent.operations.messages import LevelReport, TierTraffic
from worker_agent.tiers.level import TierStatus


def levels_of(manager: KvBlockManager) -> set[CacheLevel]:
    """Return the levels of a rank's tiers."""
    return {*manager.pools(), *(level_of(each.tier) for each in manager.stack.status())}


def reports(
    dp_rank: int, manager: KvBlockManager, naming: HashKeying | None = None
) -> Iterator[LevelReport]:
    """Yield reports of a rank's tiers, fastest first; with `naming` also their hashes."""
    below = {level_of(each.tier): each for each in manager.stack.status()}
    pools = manager.pools()
    for level in sorted({*pools, *below}):
        blocks = pools.get(level)
        pool = _known(below[level]) if blocks is None else blocks.status
        active, inactive = _hashes(manager, level, naming) if naming else (None, None)
        yield LevelReport(
            dp_rank=dp_rank,
            level=level,
            num_blocks=pool.active_blocks + pool.inactive_blocks + pool.empty_blocks,
            active_blocks=pool.active_blocks,
            inactive_blocks=pool.inactive_blocks,
            empty_blocks=pool.empty_blocks,
            private_blocks=0 if blocks is None else blocks.private_blocks,
            pool=None if blocks is None else blocks.counters,
            traffic=_traffic(below[level], manager.block_bytes) if level in below else None,
            active_hashes=active,
            inactive_hashes=inactive,
        )


def on_bus(names: Sequence[BlockName], naming: HashKeying) -> list[int]:
    """Return the block hashes as used on the bus."""
    return [int(each) for each in naming.listed([name.sequence_hash for name in names])]


def _hashes(
    manager: KvBlockManager, level: CacheLevel, naming: HashKeying
) -> tuple[list[int] | None, list[int] | None]:
    pool = manager.pools().get(level)
    if pool is None:
        return None, None
    active, inactive = pool.named().by_use()
    return on_bus(active, naming), on_bus(inactive, naming)


def _known(tier: TierStatus) -> PoolStatus:
    """Return the known state of a tier that has no pool in this process."""
    return PoolStatus(0, tier.held_blocks, max(tier.num_blocks - tier.held_blocks, 0))


def _traffic(tier: TierStatus, block_bytes: int) -> TierTraffic:
    return TierTraffic(
        stored_blocks=tier.down.blocks,
        stored_bytes=tier.down.bytes,
        store_s=tier.down.seconds,
        store_calls=tier.down.calls,
        store_failures=tier.down.failed,
        loaded_blocks=tier.up.blocks,
        loaded_bytes=tier.up.bytes,
        load_s=tier.up.seconds,
        load_failures=tier.up.failed,
        corrupt_blocks=tier.store.corrupt,
        adopted_blocks=tier.store.adopted,
        unproven_blocks=tier.store.unproven,
        waiting_blocks=tier.waiting_blocks,
        dropped_blocks=tier.dropped_blocks,
        pace_bytes_per_s=tier.pace_blocks_per_s * block_bytes,
        is_broken=tier.is_broken,
        probe=tier.probe,
    )
