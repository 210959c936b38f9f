"""Kernel that compares what is booked on ranks with what makes them busy, for `busy.py`."""

import numpy as np
import numpy.typing as npt

from router.compiled import device, kernel
from router.sequence.rank_table import (
    BUSY,
    CAPACITY_BLOCKS,
    DECODE_BLOCKS,
    MAX_BATCHED_TOKENS,
    PREFILL_TOKENS,
    USED_BLOCKS,
)

Array = npt.NDArray[np.float64]

UNKNOWN_STEP_TOKENS = 10_000_000.0
"""What an engine computes in one step where nobody knows: a great deal, as Dynamo has it."""


@device
def exceeds(row: Array, decode: float, tokens: float, steps: float) -> bool:
    """Whether a measure is above its threshold; NaN is none. Nobody is full of unknown capacity."""
    if row[CAPACITY_BLOCKS] > 0:
        blocks = max(row[DECODE_BLOCKS], row[USED_BLOCKS])
        if blocks > decode * row[CAPACITY_BLOCKS]:
            return True
    if row[PREFILL_TOKENS] > tokens:
        return True
    batched = row[MAX_BATCHED_TOKENS]
    step_tokens = batched if batched > 0 else UNKNOWN_STEP_TOKENS
    found: bool = row[PREFILL_TOKENS] > steps * step_tokens
    return found


@kernel(
    "int64(float64[:, ::1], int64[::1], float64, float64, float64, float64, boolean, boolean[::1])"
)
def mark_busy(
    values: Array,
    slots: npt.NDArray[np.int64],
    decode: float,
    tokens: float,
    steps: float,
    kept: float,
    is_latched: bool,
    busy: npt.NDArray[np.bool_],
) -> int:
    """Say which of these ranks are busy, and how many. Where they were, `kept` of each threshold
    counts. Latched, the answers are what they were the next time.
    """
    count = 0
    for i in range(len(slots)):
        row = values[slots[i]]
        scale = kept if row[BUSY] > 0 else 1.0
        busy[i] = exceeds(row, scale * decode, scale * tokens, scale * steps)
        count += busy[i]
        if is_latched:
            row[BUSY] = busy[i]
    return count
