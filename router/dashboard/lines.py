"""What the page's tables show: a line a worker, a line a rank. Small, and equal if it looks equal.

Lines are JSON arrays, in the order of their fields. Ids of workers are texts: browsers' numbers end
at 2⁵³.
"""

from typing import Final

from msgspec import Struct

from router.core import RouterCore
from router.dashboard.hit_window import HitWindow
from router.fleet import Worker
from router.protocol.values import Rank
from router.sequence.rank_table import (
    BUSY,
    DECODE_BLOCKS,
    FOREIGN_REQUESTS,
    PREFILL_TOKENS,
    REQUESTS,
    USED_BLOCKS,
)
from router.worker_views import lifecycle


class WorkerLine(Struct, frozen=True, array_like=True):
    """What is announced of a worker, and where it stands; `obstacles`: why it gets nothing new."""

    worker_id: str
    name: str
    model_name: str
    routing_group: str
    role: str
    endpoint: str
    block_size: int
    capacity_blocks: int
    lifecycle: str
    obstacles: list[str]
    labels: list[str]


class RankLine(Struct, frozen=True, array_like=True):
    """How a rank stands. Blocks of tiers are counted in each; the hit rates, 0 to 1, are of prompt
    tokens in the last minute or so, null where there were none: what we predicted of what we sent
    there, and what its engine counted of what it computed.
    """

    worker_id: str
    dp_rank: int
    trust: str
    reason: str | None
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    remote_blocks: int
    used_blocks: int
    requests: int
    foreign_requests: int
    running: int | None
    waiting: int | None
    prefill_tokens: int
    decode_blocks: int
    is_busy: bool
    predicted_hits: float | None
    actual_hits: float | None


WORKER_COLUMNS: Final = WorkerLine.__struct_fields__
RANK_COLUMNS: Final = RankLine.__struct_fields__


def worker_line(core: RouterCore, worker: Worker) -> WorkerLine:
    """One worker."""
    announced = worker.announcement
    state, obstacles = lifecycle(core, worker)
    labels = announced.labels
    places = [f"{kind}={place}" for kind, place in sorted(labels.topology_domains.items())]
    return WorkerLine(
        str(announced.worker_id),
        announced.name,
        announced.model_name,
        announced.routing_group,
        announced.role,
        announced.endpoint,
        announced.identity.block_size,
        announced.total_kv_blocks,
        state,
        obstacles,
        [*labels.taints, *places],
    )


def rank_line(
    core: RouterCore, worker: Worker, rank: Rank, hits: HitWindow, now_s: float
) -> RankLine:
    """One rank. O(1)."""
    row, trust = core.ranks.row(rank), core.trust(rank, now_s)
    device, host, disk, remote = core.index.held_state(rank).counts
    report = worker.reports.get(rank)
    gauges = None if report is None else report.gauges
    return RankLine(
        str(rank.worker_id),
        rank.dp_rank,
        trust.state.value,
        trust.reason,
        device,
        host,
        disk,
        remote,
        int(row[USED_BLOCKS]),
        int(row[REQUESTS]),
        int(row[FOREIGN_REQUESTS]),
        None if gauges is None else gauges.running_requests,
        None if gauges is None else gauges.waiting_requests,
        int(row[PREFILL_TOKENS]),
        int(row[DECODE_BLOCKS]),
        bool(row[BUSY]),
        hits.predicted,
        hits.actual,
    )
