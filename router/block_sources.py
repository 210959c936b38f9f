"""Where the chosen engine could have more of a prompt than it holds: the hint in a decision.

A hint costs nothing to pass on and nothing to pass over: the engine weighs it against computing.
"""

from collections.abc import Iterator

import numpy as np

from router.core import RouterCore
from router.indexer.base import Overlap, OverlapScores
from router.indexer.matches import Matches
from router.protocol.replies import BlockSource, SharedTier
from router.protocol.values import Rank, Tier

LOOKED_AT = 64
"""Of the ranks that hold most of a prompt; beyond, there is no hint."""

_HOST_COLUMN = 1 + Tier.HOST


def block_source(
    core: RouterCore, overlaps: OverlapScores, held_blocks: int, now_s: float
) -> BlockSource | None:
    """Who holds the most of a prompt in memory, if that is more than the chosen rank holds at all;
    of equals, who holds it on the device, then who has the least to compute. O(matches). To be
    asked where the chosen rank shares its blocks.
    """
    most = 0
    sources: list[tuple[Rank, Overlap]] = []
    for rank, overlap in _holding_more(overlaps, held_blocks):
        if overlap.host < most:
            break
        if _gives(core, rank, now_s):
            most = overlap.host
            sources.append((rank, overlap))
    if not sources:
        return None
    rank, overlap = max(sources, key=lambda each: (each[1].device, -_work(core, each[0])))
    is_on_device = overlap.device >= overlap.host
    tier: SharedTier = "device" if is_on_device else "host_pinned"
    return BlockSource(rank.worker_id, rank.dp_rank, overlap.host, tier)


def _gives(core: RouterCore, rank: Rank, now_s: float) -> bool:
    """Whether a rank shares its blocks, and is not known to be silent."""
    worker = core.fleet.get(rank.worker_id)
    if worker is None or rank.dp_rank not in worker.announcement.block_addresses:
        return False
    return core.fleet.silence_s(worker, now_s) is None


def _work(core: RouterCore, rank: Rank) -> int:
    return core.tracker.active(rank).active_prefill_tokens


def _holding_more(overlaps: OverlapScores, blocks: int) -> Iterator[tuple[Rank, Overlap]]:
    """Ranks that hold more than so many leading blocks in memory, those that hold most first."""
    if isinstance(overlaps, Matches):
        rows = overlaps.array
        rows = rows[rows[:, _HOST_COLUMN] > blocks]
        order = np.argsort(-rows[:, _HOST_COLUMN].astype(np.int64), kind="stable")
        for holder, *ends in rows[order[:LOOKED_AT]].tolist():
            yield overlaps.rank_of[holder], Overlap(*ends)
        return
    found = [each for each in overlaps.items() if each[1].host > blocks]
    yield from sorted(found, key=lambda each: -each[1].host)[:LOOKED_AT]
