"""Who holds one block, in the shape that callers read. Mutates nothing."""

import numpy as np
from msgspec import Struct

from router.core import RouterCore
from router.errors import InvalidFieldError
from router.indexer.base import NO_OVERLAP, Overlap
from router.protocol.dumps import TIER_NAMES, TierName
from router.protocol.replies import Trust
from router.protocol.values import U64_MAX


class BlockHolder(Struct, frozen=True):
    """A rank that holds the block; `fastest_tier` of those that it has it in."""

    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    fastest_tier: TierName
    trust: Trust


class BlockHolders(Struct, frozen=True):
    """Every announced rank that holds a block, whatever its model and group."""

    sequence_hash: int
    holders: list[BlockHolder]


def block_holders(core: RouterCore, sequence_hash: int, now_s: float) -> BlockHolders:
    """Who holds the block of this public hash. Raises InvalidFieldError. O(ranks)."""
    if sequence_hash > U64_MAX:
        raise InvalidFieldError("sequence_hash", "too large", f"0 to {U64_MAX}", status=422)
    alone = np.array([core.naming.name(sequence_hash)], np.uint64)
    workers = [worker.announcement for worker in core.fleet]
    scopes = {worker.scope for worker in workers}
    held = {scope: core.index.find_matches(scope, alone) for scope in scopes}
    holders = [
        BlockHolder(
            worker.model_name,
            worker.routing_group,
            rank.worker_id,
            rank.dp_rank,
            _fastest_tier(held[worker.scope].get(rank, NO_OVERLAP)),
            core.trust(rank, now_s),
        )
        for worker in workers
        for rank in worker.ranks
        if rank in held[worker.scope]
    ]
    return BlockHolders(sequence_hash, holders)


def _fastest_tier(overlap: Overlap) -> TierName:
    cumulative = (overlap.device, overlap.host, overlap.disk, overlap.remote)
    return TIER_NAMES[cumulative.index(1)]
