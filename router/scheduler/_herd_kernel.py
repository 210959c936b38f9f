"""Expected concurrent placements of other routers, computed as those routers compute them."""

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, kernel
from router.scheduler.policy._predictive_kernel import (
    COST_S,
    FOLLOWING,
    PARTS,
    arrivals_behind,
    mean_weighted,
    predict,
)
from router.scheduler.terms import CACHED_BLOCKS, TAINT_FACTOR
from router.sequence.rank_table import (
    BLOCK_SIZE,
    DECODE_BLOCKS,
    HEAD_CONTEXTS,
    HEAD_SINCE_S,
    HEAD_TOKENS,
    OUTPUT_TOKENS,
    QUEUED_CONTEXTS,
    QUEUED_TOKENS,
    REQUESTS,
    REQUESTS_PER_S,
    REUSE,
)

Array = npt.NDArray[np.float64]


@device
def put(
    row: Array, weight: float, tokens: float, contexts: float, isl_tokens: float, now_s: float
) -> None:
    """Add a booking of a request to the row, weighted by its probability."""
    if row[HEAD_TOKENS] == 0:
        row[HEAD_TOKENS] = weight * tokens
        row[HEAD_CONTEXTS] = weight * contexts
        row[HEAD_SINCE_S] = now_s
    row[QUEUED_TOKENS] += weight * tokens
    row[QUEUED_CONTEXTS] += weight * contexts
    row[REQUESTS] += weight
    if row[BLOCK_SIZE] > 0:
        row[DECODE_BLOCKS] += weight * isl_tokens / row[BLOCK_SIZE]


@device
def withdraw(row: Array, tokens: float, contexts: float, booked_s: float) -> None:
    """Remove one of our own bookings from the row."""
    row[QUEUED_TOKENS] = max(row[QUEUED_TOKENS] - tokens, 0.0)
    row[QUEUED_CONTEXTS] = max(row[QUEUED_CONTEXTS] - contexts, 0.0)
    row[REQUESTS] = max(row[REQUESTS] - 1, 0.0)
    if row[HEAD_SINCE_S] >= booked_s:
        row[HEAD_TOKENS] = 0.0
        row[HEAD_CONTEXTS] = 0.0


@kernel(
    "void(float64[:, ::1], float64[:, ::1], float64[::1], float64, float64, float64, float64,"
    " float64, float64[:, ::1])"
)
def claim(
    values: Array,
    unseen: Array,
    turns: Array,
    tokens: float,
    contexts: float,
    isl_tokens: float,
    now_s: float,
    delay_weight: float,
    claimed: Array,
) -> None:
    """Add the expected placements of other routers to `claimed`, which is a copy of `values`.

    `values` is modified too: first our unseen bookings are removed, which gives the view that all
    routers share, then each placement is added. In each turn an average request, with nothing
    cached, is placed on the cheapest candidate. O(candidates · turns).
    """
    for i in range(len(unseen)):
        withdraw(values[int(unseen[i, 0])], unseen[i, 1], unseen[i, 2], unseen[i, 3])
    output_tokens = mean_weighted(values, OUTPUT_TOKENS, REQUESTS_PER_S)
    arrivals = arrivals_behind(values)
    reuse = mean_weighted(values, REUSE, REQUESTS_PER_S)
    followers = FOLLOWING * reuse  # no candidate has cached blocks of an average request
    parts = np.empty(PARTS)
    costs = np.empty(len(values))
    for i in range(len(values)):
        values[i, CACHED_BLOCKS] = 0.0
        values[i, TAINT_FACTOR] = 1.0
        predict(values[i], tokens, isl_tokens, output_tokens, arrivals, followers, reuse,
                now_s, delay_weight, parts)  # fmt: skip
        costs[i] = parts[COST_S]
    for turn in range(len(turns)):
        best = 0
        for i in range(len(costs)):
            if costs[i] < costs[best]:
                best = i
        weight = turns[turn]
        if weight > 0:
            put(claimed[best], weight, tokens, contexts, isl_tokens, now_s)
        put(values[best], weight if weight > 0 else 1.0, tokens, contexts, isl_tokens, now_s)
        predict(values[best], tokens, isl_tokens, output_tokens, arrivals, followers, reuse,
                now_s, delay_weight, parts)  # fmt: skip
        costs[best] = parts[COST_S]
