"""The predicted cost of a request on each candidate, in seconds; the README has the formula.

terms ┬──────────────────────────────────────────────────▶ parts, costs ─▶ the best candidates
      └ expected placements of other routers, computed as those routers compute them ┘
"""

import math

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, kernel
from router.scheduler._herd_kernel import (
    BOOKED_S,
    BOOKINGS,
    CONTEXTS,
    END,
    FIRST,
    ISL_TOKENS,
    MOST_TURNS,
    ROW_CONTEXTS,
    ROW_TOKENS,
    SLOT,
    SPREAD_S,
    TOKENS,
    write_turns,
)
from router.scheduler.terms import (
    CACHED_BLOCKS,
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    OVERLAP_REMOTE,
    TAINT_FACTOR,
)
from router.sequence.rank_table import (
    BASE_S,
    BLOCK_SIZE,
    BURSTS,
    CAPACITY_BLOCKS,
    CHUNK_TOKENS,
    CONTEXT_S,
    DECODE_BLOCKS,
    DECODE_S,
    DECODE_SIDE,
    DECODING_KV_TOKENS,
    DECODING_REQUESTS,
    EAGLE,
    FOREIGN_REQUESTS,
    FOREIGN_TOKENS,
    HEAD_CONTEXTS,
    HEAD_SINCE_S,
    HEAD_TOKENS,
    HELD_BLOCKS,
    KV_S,
    OUTPUT_TOKENS,
    PLACED_AT,
    PREFILL_S,
    PREFILL_SHARE,
    PROMISED_TOKENS_PER_S,
    QUEUED_CONTEXTS,
    QUEUED_TOKENS,
    RELATIVE_ERROR,
    REQUESTS,
    REQUESTS_PER_S,
    REUSE,
    SLOW_UNTIL_S,
    TRUST_WEIGHT,
)

Array = npt.NDArray[np.float64]
Slots = npt.NDArray[np.int64]

# The parts of a candidate's cost, in seconds, as written by `predict`.
QUEUE_S = 0  # until the engine begins with this prompt
ROOM_S = 1  # until it has free blocks for it
PREFILL_OWN_S = 2  # from then to the first token
STREAM_S = 3  # from the first token to the last
DELAY_S = 4  # sum of delays of present requests, by this one and its followers
FUTURE_S = 5  # sum of delays of requests that will come
PUSHED_S = 6  # time to recompute evicted blocks that will be needed again
MISSED_S = 7  # price of an objective that is missed, of this request or of one booked there
COST_S = 8
TPOT_S = 9  # no part: the time per output token, prompts computed in between included

PARTS = 10

# What is weighed, and the request's objectives: infinite without one.
DELAY_WEIGHT, HOST_WEIGHT, DISK_WEIGHT, REMOTE_WEIGHT = 0, 1, 2, 3
MOST_TTFT_S = 4
MOST_TPOT_S = 5
WEIGHTS = 6

MISSED_PRICE_S = 1_000.0
"""Price of missing an objective: above all other costs, so that a rank that meets it is chosen."""

LATE_PRICE = 10.0
"""Price of a second by which an objective is missed."""

LATE_TOKEN_S = 0.03
"""Price of a token that was promised to a booked request, and is delayed by this one.

On the conversation trace at speeds 1.8 and 2.0, 0.01 to 0.1 met objectives alike; without it 2 %
fewer were met, and from 0.3 on the mean TTFT is 30 % longer.
"""

SLOW_START_S = 30.0
"""Slow start of a rank that has never finished a request: its cost is double at first, falling
linearly to normal after this time."""

TRIAL_PLACEMENTS = 19.0
"""Placements per candidate after which a rank that is not yet measured gets the next request.

One less than the bound of 20: several ranks may be due at once, and are served one after another.
"""

MEASURED_BURSTS = 3.0
"""Separate bursts of work after which a rank's own rates are believed, and it needs no trial."""

FOLLOWING = 1 / 3
"""Fraction of a request's followers that delay the present requests, or the later ones of those
sessions. Followers are requests that will find here what this one computes. With sessions of n
requests, both sessions still exist at the k-th request with (1 - k / n)^2, the sum of which is two
thirds of n / 2; and half of the time a session is between two requests.
"""

LATE = (STREAM_S, DELAY_S, PUSHED_S)
"""Parts that come after the first token, or concern other requests."""

PREDICTED = (
    "queue_s",
    "room_s",
    "prefill_s",
    "stream_s",
    "delay_s",
    "future_s",
    "pushed_s",
    "missed_s",
)


@device
def saved_tokens(
    row: Array, isl_tokens: float, host_weight: float, disk_weight: float, remote_weight: float
) -> float:
    """Return the prompt tokens that need no computation, weighted by trust in the overlap.

    Blocks of booked requests count as well: they are computed before this prompt's turn comes.
    """
    blocks: float = row[CACHED_BLOCKS]
    blocks += host_weight * (row[OVERLAP_HOST] - row[OVERLAP_DEVICE])
    blocks += disk_weight * (row[OVERLAP_DISK] - row[OVERLAP_HOST])
    blocks += remote_weight * (row[OVERLAP_REMOTE] - row[OVERLAP_DISK])
    blocks = max(blocks, booked_blocks(row, isl_tokens))
    tokens: float = row[TRUST_WEIGHT] * blocks * row[BLOCK_SIZE]
    return tokens


@device
def booked_blocks(row: Array, isl_tokens: float) -> float:
    """Return the leading blocks that booked requests have there, as far as an engine reuses them.

    Source: vLLM looks a prompt up when it is scheduled first, and finds the blocks of all prompts
    scheduled before it; SGLang and TensorRT-LLM let a prompt wait for blocks being computed.
    """
    if row[BLOCK_SIZE] <= 0:
        return 0.0
    booked = math.ceil(isl_tokens / row[BLOCK_SIZE]) - row[NEW_BLOCKS]
    reusable = math.floor(max(isl_tokens - 1, 0.0) / row[BLOCK_SIZE])
    blocks: float = max(min(booked, reusable) - row[EAGLE], 0.0)
    return blocks


@device
def present_blocks(row: Array, isl_tokens: float) -> float:
    """Return the leading blocks that are on the device already, or will be."""
    blocks: float = max(row[CACHED_BLOCKS], booked_blocks(row, isl_tokens))
    return blocks


@device
def mean_weighted(values: Array, column: int, weight: int) -> float:
    """Return a column's mean, weighted by another column; 0 if all weights are 0."""
    total, weights = 0.0, 0.0
    for i in range(len(values)):
        total += values[i, column] * values[i, weight]
        weights += values[i, weight]
    return total / weights if weights > 0 else 0.0


@device
def sharing(
    values: Array, isl_tokens: float, host_weight: float, disk_weight: float, remote_weight: float
) -> tuple[float, float, float]:
    """Return how much of the prompt is shared, and how busy the ranks are that do not share it.

    Three fractions: the part that need not be computed, on average; the largest part that is being
    computed for a sibling on any rank; and how many of the ranks without a sibling have requests.
    """
    total_saved, computed_tokens, without, occupied = 0.0, 0.0, 0.0, 0.0
    for i in range(len(values)):
        saved = saved_tokens(values[i], isl_tokens, host_weight, disk_weight, remote_weight)
        total_saved += saved / len(values)
        blocks = booked_blocks(values[i], isl_tokens) - values[i, CACHED_BLOCKS]
        computed_tokens = max(computed_tokens, blocks * values[i, BLOCK_SIZE])
        if blocks <= 0:
            without += 1.0
            occupied += values[i, REQUESTS] + values[i, FOREIGN_REQUESTS] > 0
    isl_tokens = max(isl_tokens, 1.0)
    return total_saved / isl_tokens, computed_tokens / isl_tokens, occupied / max(without, 1.0)


@device
def arrivals_behind(values: Array, tied: float) -> float:
    """Return the mean rate of requests that queue on a rank, per second of the queue's work.

    A request goes to a free rank if there is one, so only those that find all ranks computing
    prompts queue: the mean prefill share. Of groups of siblings, `tied` of the others queue as
    well: they stay together. New work makes a queue last 1 / (1 - share) times as long.
    """
    requests_per_s, share = 0.0, 0.0
    for i in range(len(values)):
        requests_per_s += values[i, REQUESTS_PER_S] / len(values)
        share += values[i, PREFILL_SHARE] / len(values)
    queueing = share + (1.0 - share) * tied
    return requests_per_s * queueing / max(1.0 - share, 1e-9)


@device
def followers_of(saved: float, siblings: float, reuse: float) -> float:
    """Return the expected number of later requests that are bound to this rank and cause delay.

    A request that finds the same blocks cached everywhere is bound to no rank. It is bound by the
    part of its prompt that candidates lack on average: only the chosen rank will have that part.
    But what is computed for a sibling binds the same requests, wherever this one is placed.
    """
    bound = max(1.0 - max(saved, siblings), 0.0)
    return FOLLOWING * bound * reuse


@device
def begun_s(row: Array, step_s: float, chunk_tokens: float, now_s: float) -> tuple[float, float]:
    """Return the rest of the running step, in seconds, and the part of the head computed after it.

    A prompt cannot join a running step. On a rank with decoding requests, a prompt that finds no
    other prompt waits for the end of a step, on average half of one. That applies to the head, and
    to a new prompt if there is no head.
    """
    lag_s = step_s / 2 if row[DECODING_REQUESTS] + row[FOREIGN_REQUESTS] > 0 else 0.0
    if row[HEAD_TOKENS] <= 0:
        return lag_s, 0.0
    steps = max(math.ceil(row[HEAD_TOKENS] / chunk_tokens), 1)
    compute_s = row[HEAD_TOKENS] * row[PREFILL_S] + row[HEAD_CONTEXTS] * row[CONTEXT_S]
    each_s = step_s + compute_s / steps
    elapsed_s = max(now_s - row[HEAD_SINCE_S], 0.0) - lag_s
    if elapsed_s < 0:
        return -elapsed_s, 0.0
    begun = min(math.floor(elapsed_s / each_s) + 1, steps)
    return max(begun * each_s - elapsed_s, 0.0), begun / steps


@device
def predict(
    row: Array,
    new_tokens: float,
    isl_tokens: float,
    output_tokens: float,
    arrivals: float,
    followers: float,
    reuse: float,
    now_s: float,
    delay_weight: float,
    most_ttft_s: float,
    most_tpot_s: float,
    parts: Array,
) -> None:
    """Write one candidate's parts and cost."""
    foreign = row[FOREIGN_REQUESTS]
    there = max(row[REQUESTS] + foreign, 0.0)
    decoding = max(row[DECODING_REQUESTS] + foreign, 0.0)
    kv_tokens = row[DECODING_KV_TOKENS]
    if row[DECODING_REQUESTS] >= 1:
        kv_tokens *= decoding / row[DECODING_REQUESTS]
    step_s = row[BASE_S] + decoding * row[DECODE_S] + kv_tokens * row[KV_S]
    chunk_tokens = max(row[CHUNK_TOKENS] - decoding, 1.0)

    wait_s, done = begun_s(row, step_s, chunk_tokens, now_s)
    queued_tokens = row[QUEUED_TOKENS] + row[FOREIGN_TOKENS] - done * row[HEAD_TOKENS]
    queued_tokens = max(queued_tokens, 0.0)
    queued_contexts = max(row[QUEUED_CONTEXTS] - done * row[HEAD_CONTEXTS], 0.0)
    queue_steps = math.floor(queued_tokens / chunk_tokens)
    steps = math.ceil((queued_tokens + new_tokens) / chunk_tokens) - queue_steps
    contexts = new_tokens * (isl_tokens - new_tokens / 2)
    compute_s = new_tokens * row[PREFILL_S] + contexts * row[CONTEXT_S]
    token_kv_s = row[DECODE_S] + (isl_tokens + output_tokens / 2) * row[KV_S]

    queued_s = queued_tokens * row[PREFILL_S] + queued_contexts * row[CONTEXT_S]
    parts[QUEUE_S] = wait_s + queue_steps * step_s + queued_s
    parts[ROOM_S] = room_s(row, isl_tokens, output_tokens, step_s)
    parts[PREFILL_OWN_S] = compute_s + max(steps, 1) * step_s
    parts[STREAM_S] = output_tokens * (step_s + token_kv_s)
    parts[DELAY_S] = (1.0 + followers) * there * (compute_s + output_tokens * token_kv_s)
    held_s = compute_s + new_tokens / chunk_tokens * step_s
    parts[FUTURE_S] = arrivals * held_s * (parts[QUEUE_S] + parts[PREFILL_OWN_S] / 2)
    parts[PUSHED_S] = pushed_tokens(row, isl_tokens, output_tokens) * reuse * row[PREFILL_S]
    late_s = parts[STREAM_S] + parts[DELAY_S] + parts[PUSHED_S]
    first_s = parts[QUEUE_S] + parts[ROOM_S] + parts[PREFILL_OWN_S]
    parts[TPOT_S] = (step_s + token_kv_s) / (1.0 - row[PREFILL_SHARE])
    delayed_s = compute_s + output_tokens * token_kv_s  # each request that decodes there
    parts[MISSED_S] = LATE_TOKEN_S * delayed_s * row[PROMISED_TOKENS_PER_S]
    missed_s = max(first_s - most_ttft_s, 0.0)
    missed_s += max(output_tokens, 1.0) * max(parts[TPOT_S] - most_tpot_s, 0.0)
    if missed_s > 0:
        parts[MISSED_S] += MISSED_PRICE_S + LATE_PRICE * missed_s
    cost_s = first_s + parts[FUTURE_S] + delay_weight * late_s + parts[MISSED_S]
    parts[COST_S] = cost_s * (1.0 + slow_start(row, now_s)) * row[TAINT_FACTOR]


@device
def slow_start(row: Array, now_s: float) -> float:
    """Return the fraction by which a new rank's cost is increased."""
    extra: float = max(row[SLOW_UNTIL_S] - now_s, 0.0) / SLOW_START_S
    return extra


@device
def last_placement(values: Array) -> float:
    """Return the number of the scope's placements, as of the last one on any candidate."""
    last = 0.0
    for i in range(len(values)):
        last = max(last, values[i, PLACED_AT])
    return last


@device
def trial(row: Array, placements: float, candidates: int) -> float:
    """Return the fraction by which the cost of a rank that is not yet measured is lowered.

    It grows with the placements that went elsewhere, faster the less is known of the rank, and
    reaches 1, at which the rank gets the next request, after TRIAL_PLACEMENTS per candidate. One
    wrong estimate could otherwise leave a rank without work, and so without a better estimate.
    """
    lacking = MEASURED_BURSTS - row[BURSTS]
    if lacking <= 0:
        return 0.0
    passed = (placements - row[PLACED_AT]) / (TRIAL_PLACEMENTS * candidates)
    return math.pow(min(max(passed, 0.0), 1.0), MEASURED_BURSTS / lacking)


@device
def pushed_tokens(row: Array, isl_tokens: float, output_tokens: float) -> float:
    """Return the number of cached tokens that this request would evict."""
    if row[CAPACITY_BLOCKS] <= 0:
        return 0.0
    fresh = (isl_tokens + output_tokens) / row[BLOCK_SIZE] - present_blocks(row, isl_tokens)
    lacking = row[HELD_BLOCKS] + fresh - row[CAPACITY_BLOCKS]
    tokens: float = min(max(lacking, 0.0), max(fresh, 0.0)) * row[BLOCK_SIZE]
    return tokens


@device
def room_s(row: Array, isl_tokens: float, output_tokens: float, step_s: float) -> float:
    """Return the time until enough requests have ended there to free the missing blocks.

    Requests are assumed to end evenly over the time that one of them streams.
    """
    booked = row[DECODE_BLOCKS]
    if row[CAPACITY_BLOCKS] <= 0 or math.isnan(booked) or booked < 1:
        return 0.0
    booked += row[REQUESTS] * output_tokens / row[BLOCK_SIZE]
    wanted = (isl_tokens + output_tokens) / row[BLOCK_SIZE] - present_blocks(row, isl_tokens)
    lacking = booked + wanted - row[CAPACITY_BLOCKS]
    stream_s = output_tokens * step_s / (1.0 - row[PREFILL_SHARE])
    wait_s: float = max(lacking, 0.0) / booked * stream_s
    return wait_s


@device
def write_parts(
    values: Array,
    isl_tokens: float,
    expected_output_tokens: float,
    now_s: float,
    weights: Array,
    parts: Array,
) -> None:
    """Write every candidate's parts. An output of unknown length (NaN) has the usual length."""
    delay_weight, host, disk = weights[DELAY_WEIGHT], weights[HOST_WEIGHT], weights[DISK_WEIGHT]
    remote = weights[REMOTE_WEIGHT]
    output_tokens = expected_output_tokens
    if math.isnan(output_tokens):
        output_tokens = mean_weighted(values, OUTPUT_TOKENS, REQUESTS_PER_S)
    saved_part, siblings, occupied = sharing(values, isl_tokens, host, disk, remote)
    arrivals = arrivals_behind(values, siblings * occupied)
    reuse = mean_weighted(values, REUSE, REQUESTS_PER_S)
    followers = followers_of(saved_part, siblings, reuse)
    placements = last_placement(values)
    for i in range(len(values)):
        saved = saved_tokens(values[i], isl_tokens, host, disk, remote)
        new_tokens = 0.0 if values[i, DECODE_SIDE] else max(isl_tokens - saved, 1.0)
        predict(values[i], new_tokens, isl_tokens, output_tokens, arrivals, followers, reuse,
                now_s, delay_weight, weights[MOST_TTFT_S], weights[MOST_TPOT_S],
                parts[i])  # fmt: skip
        parts[i, COST_S] *= 1.0 - trial(values[i], placements, len(values))


# ── Other routers ────────────────────────────────────────────────────────────────────────────────


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
def withdraw(row: Array, booked: Array) -> None:
    """Remove one of our own bookings from the row."""
    row[QUEUED_TOKENS] = max(row[QUEUED_TOKENS] - booked[ROW_TOKENS], 0.0)
    row[QUEUED_CONTEXTS] = max(row[QUEUED_CONTEXTS] - booked[ROW_CONTEXTS], 0.0)
    row[REQUESTS] = max(row[REQUESTS] - 1, 0.0)
    if row[HEAD_SINCE_S] >= booked[BOOKED_S]:
        row[HEAD_TOKENS] = 0.0
        row[HEAD_CONTEXTS] = 0.0


@device
def withdraw_ours(values: Array, slots: Slots, estimate: Array, ours: Array, now_s: float) -> None:
    """Remove our bookings that the other routers do not know of when they choose."""
    places = np.full(slots.max() + 1, -1)
    for i in range(len(slots)):
        places[slots[i]] = i
    for i in range(int(estimate[FIRST]), int(estimate[END])):
        slot = int(ours[i, SLOT])
        if now_s - ours[i, BOOKED_S] <= SPREAD_S and 0 <= slot < len(places) and places[slot] >= 0:
            withdraw(values[places[slot]], ours[i])


@device
def claim(
    values: Array,
    slots: Slots,
    turns: Array,
    estimate: Array,
    ours: Array,
    now_s: float,
    delay_weight: float,
    claimed: Array,
) -> None:
    """Add the expected placements of other routers to `claimed`, which is a copy of `values`.

    `values` is modified too: first our unseen bookings are removed, which gives the view that all
    routers share, then each placement is added. In each turn an average request, with nothing
    cached, is placed on the cheapest candidate. O(candidates · turns).
    """
    bookings = estimate[BOOKINGS]
    tokens, contexts = estimate[TOKENS] / bookings, estimate[CONTEXTS] / bookings
    isl_tokens = estimate[ISL_TOKENS] / bookings
    withdraw_ours(values, slots, estimate, ours, now_s)
    output_tokens = mean_weighted(values, OUTPUT_TOKENS, REQUESTS_PER_S)
    arrivals = arrivals_behind(values, 0.0)
    reuse = mean_weighted(values, REUSE, REQUESTS_PER_S)
    followers = FOLLOWING * reuse  # no candidate has cached blocks of an average request
    parts, costs = np.empty(PARTS), np.empty(len(values))
    for i in range(len(values)):
        values[i, CACHED_BLOCKS] = 0.0
        values[i, TAINT_FACTOR] = 1.0
        predict(values[i], tokens, isl_tokens, output_tokens, arrivals, followers, reuse,
                now_s, delay_weight, math.inf, math.inf, parts)  # fmt: skip
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
                now_s, delay_weight, math.inf, math.inf, parts)  # fmt: skip
        costs[best] = parts[COST_S]


@kernel(
    "Tuple((int64, int64, float64))(float64[:, ::1], int64[::1], float64, float64, float64,"
    " float64[::1], float64[::1], float64[:, ::1], float64[:, ::1])"
)
def price(
    terms: Array,
    slots: Slots,
    isl_tokens: float,
    expected_output_tokens: float,
    now_s: float,
    weights: Array,
    estimate: Array,
    ours: Array,
    parts: Array,
) -> tuple[int, int, float]:
    """Write every candidate's parts; return the cheapest, and which are as good.

    Returns the first of the cheapest, the number of candidates that are as good, and the highest
    cost of those. Without other routers these cost exactly as much; else all within one standard
    error; where routers take turns there is one.

    `slots`: of the candidates in the rank table. `weights`: see WEIGHTS. `estimate`: of other
    routers, empty without any; `ours`: our bookings.
    """
    turns = np.empty(MOST_TURNS)
    taken = write_turns(estimate, turns) if len(estimate) else 0
    counted = terms
    if taken:
        counted = terms.copy()
        claim(
            terms.copy(),
            slots,
            turns[:taken],
            estimate,
            ours,
            now_s,
            weights[DELAY_WEIGHT],
            counted,
        )
    write_parts(counted, isl_tokens, expected_output_tokens, now_s, weights, parts)
    best, ties = 0, 0
    for i in range(len(parts)):
        if parts[i, COST_S] < parts[best, COST_S]:
            best = i
    error = terms[best, RELATIVE_ERROR] if len(estimate) and not taken else 0.0
    most = parts[best, COST_S] * (1.0 + error)
    for i in range(len(parts)):
        ties += parts[i, COST_S] <= most
    return best, 1 if taken else ties, most


@kernel("void(float64[:, ::1], float64[:, ::1], float64, float64, float64[:, ::1])")
def weigh_parts(
    values: Array, seconds: Array, now_s: float, delay_weight: float, weighted: Array
) -> None:
    """Write the summands of every candidate's cost, from the parts that `predictive` wrote.

    Columns: the parts, weighted; the slow start; the change by the preference factor; that by the
    trial.
    """
    placements = last_placement(values)
    for i in range(len(values)):
        own_s = 0.0
        for part in range(COST_S):
            weight = delay_weight if part in LATE else 1.0
            weighted[i, part] = seconds[i, part] * weight
            own_s += weighted[i, part]
        slow_s = own_s * slow_start(values[i], now_s)
        before_s = own_s + slow_s
        weighted[i, COST_S] = slow_s
        weighted[i, COST_S + 1] = before_s * (values[i, TAINT_FACTOR] - 1.0)
        lowered = trial(values[i], placements, len(values))
        weighted[i, COST_S + 2] = -before_s * values[i, TAINT_FACTOR] * lowered
