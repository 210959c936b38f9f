"""Tables of terms for tests: what is not given is 0, a block has 16 tokens, and no taints.

And a slow model of the policy `predictive`: the same sums in plain Python, in the same order, so
that they are equal to the last bit.
"""

import math

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
from router.sequence import rank_table as ranks
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


# ── The model of predicted costs ─────────────────────────────────────────────────────────────────


def predicted_costs(rows, isl_tokens, expected, now_s, weights=(0.1, 0.75, 0.25, 0.0)):
    """Each candidate's cost. `rows`: lists; `weights`: of delay, and of blocks on slower tiers."""
    output = mean(rows, ranks.OUTPUT_TOKENS) if expected is None else expected
    saved = [saved_tokens(row, isl_tokens, weights[1:]) for row in rows]
    cached = 0.0
    for each in saved:
        cached += each
    cached /= len(rows)
    being_computed, occupied = siblings(rows, isl_tokens)
    bound = max(1 - max(cached / max(isl_tokens, 1.0), being_computed), 0.0)
    followers = 1 / 3 * bound * mean(rows, ranks.REUSE)
    new = [
        0.0 if row[ranks.DECODE_SIDE] else max(isl_tokens - each, 1.0)
        for row, each in zip(rows, saved, strict=True)
    ]
    arriving = arrivals(rows, being_computed * occupied)
    shared = (output, followers, mean(rows, ranks.REUSE), now_s, weights[0])
    placements = max(row[ranks.PLACED_AT] for row in rows)
    return [
        predicted_cost(row, each, isl_tokens, per_s, *shared)
        * (1 - trial(row, placements, len(rows)))
        for row, each, per_s in zip(rows, new, arriving, strict=True)
    ]


def trial(row, placements, candidates):
    """By what part the cost of a rank that is not measured yet is lowered."""
    if row[ranks.BURSTS] >= 3:
        return 0.0
    passed = (placements - row[ranks.PLACED_AT]) / (19 * candidates)
    return min(max(passed, 0.0), 1.0) ** (3 / (3 - row[ranks.BURSTS]))


def saved_tokens(row, isl_tokens, weights):
    """Tokens that need no computation: blocks of slower tiers count in part."""
    blocks = row[CACHED_BLOCKS]
    for tier, weight in enumerate(weights):
        blocks += weight * (row[OVERLAP_DEVICE + tier + 1] - row[OVERLAP_DEVICE + tier])
    return row[ranks.TRUST_WEIGHT] * max(blocks, booked(row, isl_tokens)) * row[BLOCK_SIZE]


def booked(row, isl_tokens):
    """Leading blocks that booked requests have there, as far as an engine reuses them."""
    if row[BLOCK_SIZE] <= 0:
        return 0.0
    blocks = math.ceil(isl_tokens / row[BLOCK_SIZE]) - row[NEW_BLOCKS]
    reusable = math.floor(max(isl_tokens - 1, 0) / row[BLOCK_SIZE])
    return max(min(blocks, reusable) - row[ranks.EAGLE], 0.0)


def mean(rows, column):
    """Weighted by requests a second."""
    total = weights = 0.0
    for row in rows:
        total += row[column] * row[ranks.REQUESTS_PER_S]
        weights += row[ranks.REQUESTS_PER_S]
    return total / weights if weights > 0 else 0.0


def siblings(rows, isl_tokens):
    """The part of the prompt being computed for another; how many of the other ranks have work."""
    tokens, without = 0.0, []
    for row in rows:
        blocks = booked(row, isl_tokens) - row[CACHED_BLOCKS]
        tokens = max(tokens, blocks * row[BLOCK_SIZE])
        if blocks <= 0:
            without.append(row[REQUESTS] + row[FOREIGN_REQUESTS] > 0)
    return tokens / max(isl_tokens, 1.0), sum(without) / max(len(without), 1)


def arrivals(rows, tied=0.0):
    """The requests that queue on each rank, per second of its queue."""
    total = squares = share = 0.0
    for row in rows:
        total += row[ranks.REQUESTS_PER_S]
        squares += row[ranks.REQUESTS_PER_S] * row[ranks.REQUESTS_PER_S]
        share += row[ranks.PREFILL_SHARE]
    rate, share = total / len(rows), share / len(rows)
    variance = max(squares - total * rate, 0.0) / max(len(rows) - 1, 1)
    by_chance = 20.0 * rate / 120.0
    own = 1.0 - by_chance / variance if variance > by_chance else 0.0
    queueing = (share + (1.0 - share) * tied) / max(1.0 - share, 1e-9)
    return [queueing * (rate + own * (row[ranks.REQUESTS_PER_S] - rate)) for row in rows]


def predicted_cost(row, new, isl_tokens, arriving, output, followers, reuse, now_s, delay_weight):
    """The cost of `new` tokens to compute, of a prompt of this length, by the README's formula."""
    foreign = row[FOREIGN_REQUESTS]
    there, decoding = (
        max(row[column] + foreign, 0.0) for column in (REQUESTS, ranks.DECODING_REQUESTS)
    )
    kv_tokens = row[ranks.DECODING_KV_TOKENS]
    if row[ranks.DECODING_REQUESTS] >= 1:
        kv_tokens *= decoding / row[ranks.DECODING_REQUESTS]
    step_s = row[ranks.BASE_S] + decoding * row[ranks.DECODE_S] + kv_tokens * row[ranks.KV_S]
    chunk = max(row[ranks.CHUNK_TOKENS] - decoding, 1.0)

    wait_s, done = begun(row, step_s, chunk, now_s)
    queued = row[QUEUED_TOKENS] + row[FOREIGN_TOKENS] - done * row[ranks.HEAD_TOKENS]
    queued = max(queued, 0.0)
    contexts = max(row[ranks.QUEUED_CONTEXTS] - done * row[ranks.HEAD_CONTEXTS], 0.0)
    before = math.floor(queued / chunk)
    steps = math.ceil((queued + new) / chunk) - before
    compute_s = new * row[ranks.PREFILL_S] + new * (isl_tokens - new / 2) * row[ranks.CONTEXT_S]
    token_s = row[ranks.DECODE_S] + (isl_tokens + output / 2) * row[ranks.KV_S]

    queue_s = queued * row[ranks.PREFILL_S] + contexts * row[ranks.CONTEXT_S]
    queue_s = wait_s + before * step_s + queue_s
    wait_for_room_s = room_s(row, isl_tokens, output, step_s)
    own_s = compute_s + max(steps, 1) * step_s
    stream_s = output * (step_s + token_s)
    delay_s = (1.0 + followers) * there * (compute_s + output * token_s)
    held_s = compute_s + new / chunk * step_s
    future_s = arriving * held_s * (queue_s + own_s / 2) + min(followers, 1.0) * queue_s
    pushed_s = pushed_tokens(row, isl_tokens, output) * reuse * row[ranks.PREFILL_S]
    cost_s = queue_s + wait_for_room_s + own_s + future_s
    cost_s += delay_weight * (stream_s + delay_s + pushed_s)
    slow_start = max(row[ranks.SLOW_UNTIL_S] - now_s, 0.0) / 30.0
    return cost_s * (1.0 + slow_start) * row[TAINT_FACTOR]


def begun(row, step_s, chunk, now_s):
    """The rest of the running step, and the part of the head that is computed after it."""
    lag_s = step_s / 2 if row[ranks.DECODING_REQUESTS] + row[FOREIGN_REQUESTS] > 0 else 0.0
    tokens = row[ranks.HEAD_TOKENS]
    if tokens <= 0:
        return lag_s, 0.0
    steps = max(math.ceil(tokens / chunk), 1)
    compute_s = tokens * row[ranks.PREFILL_S] + row[ranks.HEAD_CONTEXTS] * row[ranks.CONTEXT_S]
    each_s = step_s + compute_s / steps
    elapsed_s = max(now_s - row[ranks.HEAD_SINCE_S], 0.0) - lag_s
    if elapsed_s < 0:
        return -elapsed_s, 0.0
    if each_s <= 0:
        return 0.0, 1.0
    count = min(math.floor(elapsed_s / each_s) + 1, steps)
    return max(count * each_s - elapsed_s, 0.0), count / steps


def present(row, isl_tokens):
    """Leading blocks that are on the device, or will be."""
    return max(row[CACHED_BLOCKS], booked(row, isl_tokens))


def pushed_tokens(row, isl_tokens, output):
    """Cached tokens that are evicted."""
    if row[CAPACITY_BLOCKS] <= 0:
        return 0.0
    fresh = (isl_tokens + output) / row[BLOCK_SIZE] - present(row, isl_tokens)
    lacking = row[HELD_BLOCKS] + fresh - row[CAPACITY_BLOCKS]
    return min(max(lacking, 0.0), max(fresh, 0.0)) * row[BLOCK_SIZE]


def room_s(row, isl_tokens, output, step_s):
    """Until requests that end there free the missing blocks."""
    taken = row[DECODE_BLOCKS]
    if row[CAPACITY_BLOCKS] <= 0 or math.isnan(taken) or taken < 1:
        return 0.0
    taken += row[REQUESTS] * output / row[BLOCK_SIZE]
    wanted = (isl_tokens + output) / row[BLOCK_SIZE] - present(row, isl_tokens)
    lacking = taken + wanted - row[CAPACITY_BLOCKS]
    stream_s = output * step_s / (1.0 - row[ranks.PREFILL_SHARE])
    in_use = max(min(taken, row[CAPACITY_BLOCKS]), 1.0)
    return max(lacking, 0.0) / in_use * stream_s
