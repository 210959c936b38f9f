"""The arithmetic of cost policies, on the rows of a `TermTable`. Lower is better.

Every cost is multiplied by the candidate's TAINT_FACTOR. Unknown values are NaN. Each kernel also
writes the summands of each cost to `parts`, for the rows that it has.
"""

import math

import numpy as np
import numpy.typing as npt

from router.protocol.values import TIERS
from router.runtime.kernels.numba_runtime import device, kernel
from router.scheduler.terms import (
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    OVERLAP_REMOTE,
    TAINT_FACTOR,
)
from router.sequence.active._booking_steps import reusable_blocks
from router.sequence.rank_table import (
    BLOCK_SIZE,
    DECODE_BLOCKS,
    DECODE_SIDE,
    EAGLE,
    FOREIGN_REQUESTS,
    FOREIGN_TOKENS,
    HELD_BLOCKS,
    PREFILL_TOKENS,
    REQUESTS,
)

Array = npt.NDArray[np.float64]

# Columns of `shown_terms`, after the overlaps of the four cumulative tiers.
SHOWN_CACHED = TIERS  # blocks that the engine reuses, from any tier
SHOWN_PREFILL = TIERS + 1  # tokens of prompts, with this one
SHOWN_DECODE = TIERS + 2  # blocks in use, with this prompt's; 0: not tracked
SHOWN_HELD = TIERS + 3
SHOWN_OWN_REQUESTS = TIERS + 4  # booked by this router
SHOWN_REQUESTS = TIERS + 5

SHOWN = TIERS + 6


@device
def uncached_tokens(row: Array, isl_tokens: int) -> float:
    """Return the number of prompt tokens behind the prefix in the device tier."""
    return max(isl_tokens - row[OVERLAP_DEVICE] * row[BLOCK_SIZE], 0.0)


@device
def requests(row: Array) -> float:
    """Return the number of requests on a rank, of all routers."""
    return row[REQUESTS] + row[FOREIGN_REQUESTS]


@device
def write(parts: Array, i: int, one: float, two: float, three: float, cost: float) -> None:
    """Write a candidate's parts; the last is the change by its preference factor."""
    if i < len(parts):
        parts[i, 0], parts[i, 1], parts[i, 2] = one, two, three
        parts[i, 3] = cost - (one + two + three)


@kernel("void(float64[:, ::1], int64, float64, float64[::1], float64[:, ::1])")
def dynamo_1_0(values: Array, isl_tokens: int, weight: float, costs: Array, parts: Array) -> None:
    """Compute weight · potential prefill tokens / block size + potential decode blocks, in blocks.

    Unknown decode blocks are taken to equal prefill blocks, rounded down. Source: Dynamo 1.0.2,
    `DefaultWorkerSelector`.
    """
    for i in range(len(costs)):
        row = values[i]
        prefill_tokens = row[PREFILL_TOKENS] + uncached_tokens(row, isl_tokens)
        prefill_blocks = prefill_tokens / row[BLOCK_SIZE]
        decode_blocks = row[DECODE_BLOCKS] + row[NEW_BLOCKS]
        if math.isnan(decode_blocks):
            decode_blocks = math.floor(prefill_blocks)
        costs[i] = (weight * prefill_blocks + decode_blocks) * row[TAINT_FACTOR]
        write(parts, i, weight * prefill_blocks, decode_blocks, 0.0, costs[i])


@device
def lowest_prefill_tokens(values: Array) -> float:
    """Return the fewest booked prefill tokens of all candidates."""
    lowest = math.inf
    for i in range(len(values)):
        lowest = min(lowest, values[i, PREFILL_TOKENS])
    return lowest


@device
def tier_credit(
    row: Array, device_credit: float, host_weight: float, disk_weight: float, remote_weight: float
) -> float:
    """Return the blocks of prefill that the tiers save; a slower one adds what faster ones lack."""
    credit = device_credit * row[OVERLAP_DEVICE]
    credit += host_weight * (row[OVERLAP_HOST] - row[OVERLAP_DEVICE])
    credit += disk_weight * (row[OVERLAP_DISK] - row[OVERLAP_HOST])
    return credit + remote_weight * (row[OVERLAP_REMOTE] - row[OVERLAP_DISK])


@kernel(
    "void(float64[:, ::1], int64, int64, float64, float64, float64, float64, float64, float64,"
    " float64, float64[::1], float64[:, ::1])"
)
def dynamo_1_6(
    values: Array,
    isl_tokens: int,
    tracks_prefill: int,
    prefill_load_scale: float,
    credit: float,
    credit_decay: float,
    host_weight: float,
    disk_weight: float,
    remote_weight: float,
    request_weight: float,
    costs: Array,
    parts: Array,
) -> None:
    """Compute scale · max(raw prefill − credit, 0) + decode + weight · requests, in blocks.

    If prefill is not tracked it is 0, and a rank that only decodes has the credit subtracted from
    its decode blocks instead. Source: Dynamo 1.6.1, `DefaultWorkerSelector`.
    """
    lowest = lowest_prefill_tokens(values)
    for i in range(len(costs)):
        row = values[i]
        block_size, prefill_tokens = row[BLOCK_SIZE], row[PREFILL_TOKENS]
        decay, raw_blocks = 1.0, 0.0
        if tracks_prefill:
            raw_blocks = (prefill_tokens + isl_tokens) / block_size
            excess = (prefill_tokens - lowest) / block_size
            request_blocks = max(math.ceil(isl_tokens / block_size), 1)
            decay = 1.0 / (1.0 + credit_decay * (excess / request_blocks))
        saved = tier_credit(row, credit * decay, host_weight, disk_weight, remote_weight)
        decode_blocks = row[DECODE_BLOCKS] + row[NEW_BLOCKS]
        if math.isnan(decode_blocks):
            decode_blocks = 0.0
        if row[DECODE_SIDE] and not tracks_prefill and credit > 0:
            prefill_blocks, decode_blocks = 0.0, max(decode_blocks - saved, 0.0)
        else:
            prefill_blocks = prefill_load_scale * max(raw_blocks - saved, 0.0)
        request_blocks = request_weight * row[REQUESTS]
        costs[i] = (prefill_blocks + decode_blocks + request_blocks) * row[TAINT_FACTOR]
        write(parts, i, prefill_blocks, decode_blocks, request_blocks, costs[i])


@kernel("void(float64[:, ::1], float64[::1], float64[:, ::1])")
def active_requests(values: Array, costs: Array, parts: Array) -> None:
    """Compute the number of requests on each rank, of all routers."""
    for i in range(len(costs)):
        costs[i] = requests(values[i]) * values[i, TAINT_FACTOR]
        write(parts, i, values[i, REQUESTS], values[i, FOREIGN_REQUESTS], 0.0, costs[i])


@kernel("void(float64[:, ::1], int64, float64[::1], float64[:, ::1])")
def lmetric(values: Array, isl_tokens: int, costs: Array, parts: Array) -> None:
    """Compute prefill tokens · requests, both including this request, in token·requests.

    Source: arXiv 2603.15202.
    """
    for i in range(len(costs)):
        row = values[i]
        queued_tokens, batch = row[PREFILL_TOKENS] + row[FOREIGN_TOKENS], requests(row) + 1.0
        own_tokens = uncached_tokens(row, isl_tokens)
        costs[i] = (queued_tokens + own_tokens) * batch * row[TAINT_FACTOR]
        write(parts, i, queued_tokens * batch, own_tokens * batch, 0.0, costs[i])


@kernel("int64(float64[:, ::1], int64, float64, float64, float64, float64[::1], float64[:, ::1])")
def cache_aware(
    values: Array,
    isl_tokens: int,
    balance_abs: float,
    balance_rel: float,
    cache_threshold: float,
    costs: Array,
    parts: Array,
) -> int:
    """Compute uncached fractions if load is even and the best match is good, else request counts.

    Returns 1 for fractions of the prompt, 0 for request counts. Load is uneven if the busiest rank
    has more than `balance_abs` requests more than the idlest, and more than `balance_rel` times as
    many. Source: SGLang's `cache_aware` policy.
    """
    lowest, highest, best_tokens = math.inf, 0.0, 0.0
    for i in range(len(costs)):
        row = values[i]
        lowest, highest = min(lowest, requests(row)), max(highest, requests(row))
        to_compute = uncached_tokens(row, isl_tokens)
        best_tokens = max(best_tokens, isl_tokens - to_compute)
        costs[i] = to_compute / max(isl_tokens, 1)
    is_uneven = highest - lowest > balance_abs and highest > balance_rel * lowest
    follows_cache = best_tokens / max(isl_tokens, 1) > cache_threshold and not is_uneven
    for i in range(len(costs)):
        uncached = costs[i] if follows_cache else 0.0
        there = 0.0 if follows_cache else requests(values[i])
        costs[i] = (uncached + there) * values[i, TAINT_FACTOR]
        write(parts, i, uncached, there, 0.0, costs[i])
    return 1 if follows_cache else 0


@kernel("void(float64[:, ::1], int64, int64[:, ::1])")
def shown_terms(values: Array, isl_tokens: int, shown: npt.NDArray[np.int64]) -> None:
    """Write what callers read of each candidate's terms, as `TermTable.terms` does for one."""
    for i in range(len(values)):
        row = values[i]
        for tier in range(TIERS):
            shown[i, tier] = int(row[OVERLAP_DEVICE + tier])
        cached = reusable_blocks(row[OVERLAP_REMOTE], isl_tokens, row[BLOCK_SIZE], row[EAGLE])
        shown[i, SHOWN_CACHED] = int(cached)
        shown[i, SHOWN_PREFILL] = int(row[PREFILL_TOKENS]) + int(uncached_tokens(row, isl_tokens))
        decode_blocks = row[DECODE_BLOCKS] + row[NEW_BLOCKS]
        shown[i, SHOWN_DECODE] = 0 if math.isnan(decode_blocks) else int(decode_blocks)
        shown[i, SHOWN_HELD] = int(row[HELD_BLOCKS])
        shown[i, SHOWN_OWN_REQUESTS] = int(row[REQUESTS])
        shown[i, SHOWN_REQUESTS] = int(requests(row))
