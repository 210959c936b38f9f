"""The parts of one candidate's predicted cost, in seconds; the README has the formula."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device
from router.scheduler.terms import (
    CACHED_BLOCKS,
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_DISK,
    OVERLAP_HOST,
    OVERLAP_REMOTE,
    TAINT_FACTOR,
)
from router.sequence.active._booking_steps import reusable_blocks
from router.sequence.rank_table import (
    BASE_S,
    BLOCK_SIZE,
    BURSTS,
    CAPACITY_BLOCKS,
    CHUNK_TOKENS,
    CONTEXT_S,
    DECODE_BLOCKS,
    DECODE_S,
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
    PLACED_AT,
    PREFILL_S,
    PREFILL_SHARE,
    PROMISED_TOKENS_PER_S,
    QUEUED_CONTEXTS,
    QUEUED_TOKENS,
    REQUESTS,
    REQUESTS_PER_S,
    SLOW_UNTIL_S,
    TRUST_WEIGHT,
)

Array = npt.NDArray[np.float64]

# What is weighed, and the request's objectives: infinite without one.
DELAY_WEIGHT, HOST_WEIGHT, DISK_WEIGHT, REMOTE_WEIGHT = 0, 1, 2, 3
MOST_TTFT_S = 4
MOST_TPOT_S = 5

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


class Request(NamedTuple):
    """A request, and the figures that are the same for all of its candidates.

    `queueing_part`: requests that queue on a rank, per request received in the queue's time.
    `requests_per_s`: received by a rank, on average. `own_part`: how much of a rank's own rate is
    believed. `followers`: later requests that this one binds to its rank. `reuse`: prompt tokens
    found cached per computed one.
    """

    isl_tokens: float
    output_tokens: float
    now_s: float
    queueing_part: float
    requests_per_s: float
    own_part: float
    followers: float
    reuse: float


class Parts(NamedTuple):
    """The parts of a candidate's cost, in seconds, and the cost."""

    queue_s: float
    """until the engine begins with this prompt"""
    room_s: float
    """until it has free blocks for it"""
    prefill_s: float
    """from then to the first token"""
    stream_s: float
    """from the first token to the last"""
    delay_s: float
    """sum of delays of present requests, by this one and its followers"""
    future_s: float
    """sum of delays of requests that will come, and the wait here of the next that is bound here"""
    pushed_s: float
    """time to recompute evicted blocks that will be needed again"""
    missed_s: float
    """price of an objective that is missed, of this request or of one booked there"""
    cost_s: float
    tpot_s: float
    """no part: the time per output token, prompts computed in between included"""


PARTS = len(Parts._fields)
QUEUE_S, ROOM_S, PREFILL_OWN_S, STREAM_S, DELAY_S = 0, 1, 2, 3, 4  # columns of written parts
FUTURE_S, PUSHED_S, MISSED_S, COST_S, TPOT_S = 5, 6, 7, 8, 9
PREDICTED = Parts._fields[:COST_S]

LATE = (STREAM_S, DELAY_S, PUSHED_S)
"""Parts that come after the first token, or concern other requests."""


@device
def booked_blocks(row: Array, isl_tokens: float) -> float:
    """Return the leading blocks that booked requests have there, as far as an engine reuses them.

    Source: vLLM looks a prompt up when it is scheduled first, and finds the blocks of all prompts
    scheduled before it; SGLang and TensorRT-LLM let a prompt wait for blocks being computed.
    """
    if row[BLOCK_SIZE] <= 0:
        return 0.0
    booked = np.ceil(isl_tokens / row[BLOCK_SIZE]) - row[NEW_BLOCKS]
    blocks: float = reusable_blocks(booked, isl_tokens, row[BLOCK_SIZE], row[EAGLE])
    return blocks


@device
def saved_tokens(row: Array, booked: float, weights: Array) -> float:
    """Return the prompt tokens that need no computation, weighted by trust in the overlap.

    `booked`: leading blocks of booked requests; they are computed before this prompt's turn comes.
    """
    blocks: float = row[CACHED_BLOCKS]
    blocks += weights[HOST_WEIGHT] * (row[OVERLAP_HOST] - row[OVERLAP_DEVICE])
    blocks += weights[DISK_WEIGHT] * (row[OVERLAP_DISK] - row[OVERLAP_HOST])
    blocks += weights[REMOTE_WEIGHT] * (row[OVERLAP_REMOTE] - row[OVERLAP_DISK])
    tokens: float = row[TRUST_WEIGHT] * max(blocks, booked) * row[BLOCK_SIZE]
    return tokens


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
    steps = max(np.ceil(row[HEAD_TOKENS] / chunk_tokens), 1)
    compute_s = row[HEAD_TOKENS] * row[PREFILL_S] + row[HEAD_CONTEXTS] * row[CONTEXT_S]
    each_s = step_s + compute_s / steps
    elapsed_s = max(now_s - row[HEAD_SINCE_S], 0.0) - lag_s
    if elapsed_s < 0:
        return -elapsed_s, 0.0
    if each_s <= 0:  # without any rate yet
        return 0.0, 1.0
    begun = min(np.floor(elapsed_s / each_s) + 1, steps)
    return max(begun * each_s - elapsed_s, 0.0), begun / steps


@device
def predict(
    row: Array, booked: float, new_tokens: float, request: Request, weights: Array
) -> Parts:
    """Return a candidate's parts and cost, if `new_tokens` of the prompt are computed there."""
    isl_tokens, output_tokens, reuse = request.isl_tokens, request.output_tokens, request.reuse
    foreign = row[FOREIGN_REQUESTS]
    there = max(row[REQUESTS] + foreign, 0.0)
    decoding = max(row[DECODING_REQUESTS] + foreign, 0.0)
    kv_tokens = row[DECODING_KV_TOKENS]
    if row[DECODING_REQUESTS] >= 1:
        kv_tokens *= decoding / row[DECODING_REQUESTS]
    step_s = row[BASE_S] + decoding * row[DECODE_S] + kv_tokens * row[KV_S]
    chunk_tokens = max(row[CHUNK_TOKENS] - decoding, 1.0)

    wait_s, done = begun_s(row, step_s, chunk_tokens, request.now_s)
    queued_tokens = row[QUEUED_TOKENS] + row[FOREIGN_TOKENS] - done * row[HEAD_TOKENS]
    queued_tokens = max(queued_tokens, 0.0)
    queued_contexts = max(row[QUEUED_CONTEXTS] - done * row[HEAD_CONTEXTS], 0.0)
    queue_steps = np.floor(queued_tokens / chunk_tokens)
    steps = np.ceil((queued_tokens + new_tokens) / chunk_tokens) - queue_steps
    contexts = new_tokens * (isl_tokens - new_tokens / 2)
    compute_s = new_tokens * row[PREFILL_S] + contexts * row[CONTEXT_S]
    token_kv_s = row[DECODE_S] + (isl_tokens + output_tokens / 2) * row[KV_S]
    delayed_s = compute_s + output_tokens * token_kv_s  # each request that decodes there

    queued_s = queued_tokens * row[PREFILL_S] + queued_contexts * row[CONTEXT_S]
    queue_s = wait_s + queue_steps * step_s + queued_s
    prefill_s = compute_s + max(steps, 1) * step_s
    stream_s = output_tokens * (step_s + token_kv_s)
    delay_s = (1.0 + request.followers) * there * delayed_s
    held_s = compute_s + new_tokens / chunk_tokens * step_s
    own_per_s = request.own_part * (row[REQUESTS_PER_S] - request.requests_per_s)
    arrivals_per_s = request.queueing_part * (request.requests_per_s + own_per_s)
    future_s = arrivals_per_s * held_s * (queue_s + prefill_s / 2)
    future_s += min(request.followers, 1.0) * queue_s
    room_s, pushed = 0.0, 0.0
    if row[CAPACITY_BLOCKS] > 0:
        wanted = (isl_tokens + output_tokens) / row[BLOCK_SIZE] - max(row[CACHED_BLOCKS], booked)
        room_s = until_room_s(row, wanted, output_tokens, step_s)
        pushed = min(max(row[HELD_BLOCKS] + wanted - row[CAPACITY_BLOCKS], 0.0), max(wanted, 0.0))
    pushed_s = pushed * row[BLOCK_SIZE] * reuse * row[PREFILL_S]
    tpot_s = (step_s + token_kv_s) / (1.0 - row[PREFILL_SHARE])

    first_s = queue_s + room_s + prefill_s
    late_s = max(first_s - weights[MOST_TTFT_S], 0.0)
    late_s += max(output_tokens, 1.0) * max(tpot_s - weights[MOST_TPOT_S], 0.0)
    missed_s = LATE_TOKEN_S * delayed_s * row[PROMISED_TOKENS_PER_S]
    if late_s > 0:
        missed_s += MISSED_PRICE_S + LATE_PRICE * late_s
    after_s = weights[DELAY_WEIGHT] * (stream_s + delay_s + pushed_s)
    cost_s = first_s + future_s + after_s + missed_s
    cost_s = cost_s * (1.0 + slow_start(row, request.now_s)) * row[TAINT_FACTOR]
    return Parts(queue_s, room_s, prefill_s, stream_s, delay_s, future_s, pushed_s, missed_s,
                 cost_s, tpot_s)  # fmt: skip


@device
def until_room_s(row: Array, wanted_blocks: float, output_tokens: float, step_s: float) -> float:
    """Return the time until enough requests have ended there to free the missing blocks.

    Requests that the engine has room for are assumed to end evenly over the time that one of them
    streams; the others take their places.
    """
    booked = row[DECODE_BLOCKS]
    if math.isnan(booked) or booked < 1:
        return 0.0
    booked += row[REQUESTS] * output_tokens / row[BLOCK_SIZE]
    lacking = booked + wanted_blocks - row[CAPACITY_BLOCKS]
    if lacking <= 0:
        return 0.0
    streaming = max(min(booked, row[CAPACITY_BLOCKS]), 1.0)
    wait_s: float = lacking / streaming * (output_tokens * step_s / (1.0 - row[PREFILL_SHARE]))
    return wait_s


@device
def slow_start(row: Array, now_s: float) -> float:
    """Return the fraction by which a new rank's cost is increased."""
    extra: float = max(row[SLOW_UNTIL_S] - now_s, 0.0) / SLOW_START_S
    return extra


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
    passed = min(max(passed, 0.0), 1.0)
    return passed if lacking == MEASURED_BURSTS else math.pow(passed, MEASURED_BURSTS / lacking)
