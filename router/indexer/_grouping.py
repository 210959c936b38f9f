"""Kernels that sort rows {holder id and tier mask, block} by holder and tier: count, then lay."""

import numpy as np

from router.compiled import kernel
from router.indexer._sets import MASK_BITS
from router.indexer._table import Words
from router.protocol.values import TIERS

_1 = np.uint64(1)


@kernel("int64(Array(uint64, 2, 'C', readonly=True), uint64[:, ::1])")
def count(rows: Words, counts: Words) -> int:
    """Add what the rows say to the counts, of shape (holders, TIERS); returns how many blocks."""
    total = 0
    for i in range(len(rows)):
        holder = rows[i, 0] >> MASK_BITS
        for tier in range(TIERS):
            bit = rows[i, 0] >> np.uint64(tier) & _1
            counts[holder, tier] += bit
            total += int(bit)
    return total


@kernel("int64(Array(uint64, 2, 'C', readonly=True), uint64[:, ::1], uint64[::1])")
def lay(rows: Words, ends: Words, blocks: Words) -> int:
    """Write each block to where those of its holder and tier end so far; returns how many."""
    total = 0
    for i in range(len(rows)):
        holder = rows[i, 0] >> MASK_BITS
        for tier in range(TIERS):
            if rows[i, 0] >> np.uint64(tier) & _1:
                blocks[ends[holder, tier]] = rows[i, 1]
                ends[holder, tier] += _1
                total += 1
    return total
