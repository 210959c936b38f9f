"""Kernels that compare the ranks' booked load with busy thresholds."""

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, kernel
from router.sequence.rank_table import (
    BUSY,
    CAPACITY_BLOCKS,
    DECODE_BLOCKS,
    MAX_BATCHED_TOKENS,
    PREFILL_TOKENS,
    QUEUED_TOKENS,
    USED_BLOCKS,
)

Array = npt.NDArray[np.float64]

UNKNOWN_STEP_TOKENS = 10_000_000.0
"""Tokens per step of an engine that publishes no limit: practically unlimited, as in Dynamo."""


@device
def step_tokens(row: Array) -> float:
    """Return the most tokens that a rank's engine computes in one step."""
    batched: float = row[MAX_BATCHED_TOKENS]
    return batched if batched > 0 else UNKNOWN_STEP_TOKENS


@device
def exceeds(row: Array, decode: float, tokens: float, steps: float) -> bool:
    """Return whether a measure exceeds its threshold; NaN disables one, no capacity the first."""
    if row[CAPACITY_BLOCKS] > 0:
        blocks = max(row[DECODE_BLOCKS], row[USED_BLOCKS])
        if blocks > decode * row[CAPACITY_BLOCKS]:
            return True
    if row[PREFILL_TOKENS] > tokens:
        return True
    found: bool = row[PREFILL_TOKENS] > steps * step_tokens(row)
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
    """Write which of these ranks are busy. Returns their number.

    For a rank that was busy, `kept` times each threshold counts. If `is_latched`, the result is
    stored as the ranks' previous state for the next call.
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


@kernel("boolean(float64[:, ::1], int64[::1], float64, float64, float64)")
def is_any_free(
    values: Array, slots: npt.NDArray[np.int64], tokens: float, steps: float, part: float
) -> bool:
    """Return whether the queued tokens of one of these slots are within this part of both limits.

    Infinity disables one. `values`: the rank table, or rows of it.
    """
    for slot in slots:
        if values[slot, QUEUED_TOKENS] / part <= min(tokens, steps * step_tokens(values[slot])):
            return True
    return False
