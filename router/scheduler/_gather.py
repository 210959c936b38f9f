"""Kernel that lays out the terms of a decision, for `weighing.py`."""

import numpy as np
import numpy.typing as npt

from router.compiled import kernel
from router.protocol.values import TIERS
from router.scheduler.terms import (
    CACHED_BLOCKS,
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    TAINT_FACTOR,
)
from router.sequence.rank_table import BLOCK_SIZE, EAGLE, RANK_COLUMNS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
NO_SLOT = -1


@kernel(
    "void(float64[:, ::1], int64[::1], int64[::1], Array(uint32, 2, 'C', readonly=True),"
    " int64[::1], float64[:, ::1], float64[::1], int64, int64, float64[:, ::1])"
)
def gather(
    ranks: Floats,
    slots: Ints,
    positions: Ints,
    matches: npt.NDArray[np.uint32],
    slot_of: Ints,
    overlaps: Floats,
    depths: Floats,
    total_blocks: int,
    isl_tokens: int,
    terms: Floats,
) -> None:
    """Write the terms of the candidates at these positions; leaves the scratch arrays zeroed.

    `ranks`: the rank table. `slots`: of every candidate. `matches`: rows {holder, end in each
    cumulative tier}; `slot_of`: of each holder, or NO_SLOT. `overlaps`, `depths`: scratch, by slot;
    `depths` says how much of the prompt is booked there.
    """
    for i in range(len(matches)):
        slot = slot_of[matches[i, 0]]
        if slot != NO_SLOT:
            for tier in range(TIERS):
                overlaps[slot, tier] = matches[i, 1 + tier]
    for i in range(len(positions)):
        slot = slots[positions[i]]
        row = terms[positions[i]]
        for column in range(RANK_COLUMNS):
            row[column] = ranks[slot, column]
        for tier in range(TIERS):
            row[OVERLAP_DEVICE + tier] = overlaps[slot, tier]
        reusable = max(isl_tokens - 1, 0) // max(int(row[BLOCK_SIZE]), 1)
        cached = min(row[OVERLAP_DEVICE], float(reusable)) - row[EAGLE]
        row[CACHED_BLOCKS] = max(cached, 0.0)
        row[NEW_BLOCKS] = total_blocks - depths[slot]
        row[TAINT_FACTOR] = 1.0
    overlaps[:] = 0.0
    depths[:] = 0.0
