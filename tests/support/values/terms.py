"""Tables of terms for tests: what is not given is 0, a block has 16 tokens, and no taints."""

import numpy as np

from router.protocol.values import Rank, Scope
from router.scheduler.terms import (
    CACHED_BLOCKS,
    COLUMNS,
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    OVERLAP_REMOTE,
    TAINT_FACTOR,
    TermTable,
)
from router.sequence.rank_table import (
    BLOCK_SIZE,
    CAPACITY_BLOCKS,
    DECODE_BLOCKS,
    DECODE_SIDE,
    FOREIGN_REQUESTS,
    FOREIGN_TOKENS,
    HELD_BLOCKS,
    PREFILL_TOKENS,
    QUEUED_TOKENS,
    REQUESTS,
)

COLUMN_OF = {
    "block_size": BLOCK_SIZE,
    "cached": CACHED_BLOCKS,
    "capacity": CAPACITY_BLOCKS,
    "prefill_tokens": [PREFILL_TOKENS, QUEUED_TOKENS],
    "decode_blocks": DECODE_BLOCKS,
    "decode_side": DECODE_SIDE,
    "requests": REQUESTS,
    "foreign_tokens": FOREIGN_TOKENS,
    "foreign_requests": FOREIGN_REQUESTS,
    "held": HELD_BLOCKS,
    "new_blocks": NEW_BLOCKS,
    "taint": TAINT_FACTOR,
}


def candidate(overlap=(), **columns):
    """One row; `overlap`: cumulative blocks by tier, the last one standing for those behind it."""
    row = np.zeros(COLUMNS)
    row[BLOCK_SIZE], row[TAINT_FACTOR] = 16, 1
    by_tier = [*([overlap] if isinstance(overlap, int) else overlap)] or [0]
    by_tier += [by_tier[-1]] * (4 - len(by_tier))
    row[[OVERLAP_DEVICE, OVERLAP_HOST, OVERLAP_DISK, OVERLAP_REMOTE]] = by_tier
    for name, value in columns.items():
        row[COLUMN_OF[name]] = value
    return row


def table(*rows, isl_tokens=160, scope=Scope(), worker_ids=None):  # noqa: B008 - frozen
    """A candidate a row: worker 1 rank 0, worker 2 rank 0, …, or these workers."""
    ranks = tuple(Rank(worker_id, 0) for worker_id in worker_ids or range(1, len(rows) + 1))
    return TermTable(scope, ranks, np.stack(rows), isl_tokens, None, 0.0)
