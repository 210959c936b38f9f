"""Kernels that group rows {holder id and tier mask, block} by holder and tier (counting sort)."""

import numpy as np

from router.indexer.radix_tree._block_table import Words
from router.indexer.radix_tree._holder_sets import MASK_BITS
from router.protocol.values import TIERS
from router.runtime.kernels.numba_runtime import kernel

_1 = np.uint64(1)


@kernel("int64(Array(uint64, 2, 'C', readonly=True), uint64[:, ::1])")
def count(rows: Words, counts: Words) -> int:
    """Add the rows to `counts`, of shape (holders, TIERS). Returns the number of blocks added."""
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
    """Write each block to the end of its holder's and tier's range. Returns the number written."""
    total = 0
    for i in range(len(rows)):
        holder = rows[i, 0] >> MASK_BITS
        for tier in range(TIERS):
            if rows[i, 0] >> np.uint64(tier) & _1:
                blocks[ends[holder, tier]] = rows[i, 1]
                ends[holder, tier] += _1
                total += 1
    return total
