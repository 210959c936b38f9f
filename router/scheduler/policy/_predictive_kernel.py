"""The predicted cost of a request on each candidate, in seconds; the README has the formula.

terms ┬──────────────────────────────────────────────────▶ parts, costs ─▶ the best candidates
      └ expected placements of other routers, computed as those routers compute them ┘
"""

import math
from typing import NamedTuple

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
from router.scheduler.policy._predicted_parts import (
    COST_S,
    DELAY_WEIGHT,
    LATE,
    MOST_TPOT_S,
    MOST_TTFT_S,
    PARTS,
    Parts,
    Request,
    booked_blocks,
    predict,
    saved_tokens,
    slow_start,
    trial,
)
from router.scheduler.terms import CACHED_BLOCKS, NEW_BLOCKS, OVERLAP_DEVICE, TAINT_FACTOR
from router.sequence.rank_table import (
    BLOCK_SIZE,
    DECODE_BLOCKS,
    DECODE_SIDE,
    FOREIGN_REQUESTS,
    HEAD_CONTEXTS,
    HEAD_SINCE_S,
    HEAD_TOKENS,
    OUTPUT_TOKENS,
    PLACED_AT,
    PREFILL_SHARE,
    QUEUED_CONTEXTS,
    QUEUED_TOKENS,
    RELATIVE_ERROR,
    REQUESTS,
    REQUESTS_PER_S,
    REUSE,
    TRAFFIC_MEMORY_S,
)

Array = npt.NDArray[np.float64]
Slots = npt.NDArray[np.int64]

FOLLOWING = 1 / 3
"""Fraction of a request's followers that delay the present requests, or the later ones of those
sessions. Followers are requests that will find here what this one computes. With sessions of n
requests, both sessions still exist at the k-th request with (1 - k / n)^2, the sum of which is two
thirds of n / 2; and half of the time a session is between two requests.
"""

CLUSTER_REQUESTS = 20.0
"""Requests that go to a rank together, as turns of sessions do: by chance, the count of a time
varies as if this many came at once.

On the conversation trace, 1 makes a mean TTFT up to 1.15 times as long, 20 and 40 nothing. With
chats beside long documents, 1 to 40 make it a third of that with the mean rate alone.
"""


class Survey(NamedTuple):
    """Sums over the candidates of a request."""

    saved_part: float
    """part of the prompt that need not be computed, on average"""
    sibling_part: float
    """largest part of the prompt that is being computed for a sibling on any rank"""
    occupied: float
    """fraction of the ranks without a sibling that have requests"""
    requests_per_s: float
    """received by a rank, on average"""
    own_part: float
    """part of the difference between a rank's rate of requests and the mean that is believed"""
    prefill_share: float
    """fraction of a rank's time spent on prompts"""
    output_tokens: float
    """of a usual request"""
    reuse: float
    """prompt tokens found cached per computed one"""
    placements: float
    """placements of the scope, as of the last one on any candidate"""


@device
def survey(values: Array, isl_tokens: float, weights: Array, booked: Array) -> Survey:
    """Return the sums over all candidates, and write `booked_blocks` of each. One pass."""
    saved, sibling_tokens, without, occupied = 0.0, 0.0, 0.0, 0.0
    requests_per_s, squares, share, placements = 0.0, 0.0, 0.0, 0.0
    output_tokens, reuse = 0.0, 0.0
    for i in range(len(values)):
        row = values[i]
        booked[i] = booked_blocks(row, isl_tokens)
        saved += saved_tokens(row, booked[i], weights)
        blocks = booked[i] - row[CACHED_BLOCKS]
        sibling_tokens = max(sibling_tokens, blocks * row[BLOCK_SIZE])
        if blocks <= 0:
            without += 1.0
            occupied += row[REQUESTS] + row[FOREIGN_REQUESTS] > 0
        requests_per_s += row[REQUESTS_PER_S]
        squares += row[REQUESTS_PER_S] * row[REQUESTS_PER_S]
        share += row[PREFILL_SHARE]
        output_tokens += row[OUTPUT_TOKENS] * row[REQUESTS_PER_S]
        reuse += row[REUSE] * row[REQUESTS_PER_S]
        placements = max(placements, row[PLACED_AT])
    ranks, isl_tokens = max(len(values), 1), max(isl_tokens, 1.0)
    if requests_per_s > 0:
        output_tokens, reuse = output_tokens / requests_per_s, reuse / requests_per_s
    return Survey(saved / ranks / isl_tokens, sibling_tokens / isl_tokens,
                  occupied / max(without, 1.0), requests_per_s / ranks,
                  believed_part(requests_per_s, squares, ranks), share / ranks,
                  output_tokens, reuse, placements)  # fmt: skip


@device
def believed_part(sum_per_s: float, squares: float, ranks: int) -> float:
    """Return the part of a rank's rate of requests that is its own; the rest is that of all ranks.

    An estimate that shrinks towards the mean (James and Stein, 1961): the fewer of the observed
    differences chance explains, the more of each is believed. Where ranks are alike, their own
    rates would be noise that costs cache hits; where some get few, but long prompts, a queue
    delays few others there.
    """
    mean = sum_per_s / ranks
    variance = max(squares - sum_per_s * mean, 0.0) / max(ranks - 1, 1)
    # Exponential averages of a rate count over 2 time constants.
    by_chance = CLUSTER_REQUESTS * mean / (2.0 * TRAFFIC_MEMORY_S)
    return 1.0 - by_chance / variance if variance > by_chance else 0.0


@device
def queueing_part(found: Survey) -> float:
    """Return the requests that queue on a rank, per request that it receives in the queue's time.

    A request goes to a free rank if there is one, so only those that find all ranks computing
    prompts queue: the mean prefill share. Of groups of siblings, a part of the others queues as
    well: they stay together. New work makes a queue last 1 / (1 - share) times as long.
    """
    share, tied = found.prefill_share, found.sibling_part * found.occupied
    return (share + (1.0 - share) * tied) / max(1.0 - share, 1e-9)


@device
def followers_of(found: Survey) -> float:
    """Return the expected number of later requests that are bound to this rank and cause delay.

    A request that finds the same blocks cached everywhere is bound to no rank. It is bound by the
    part of its prompt that candidates lack on average: only the chosen rank will have that part.
    But what is computed for a sibling binds the same requests, wherever this one is placed.
    """
    bound = max(1.0 - max(found.saved_part, found.sibling_part), 0.0)
    return FOLLOWING * bound * found.reuse


@device
def request_of(
    found: Survey, isl_tokens: float, expected_output_tokens: float, now_s: float
) -> Request:
    """Return the request, with what its candidates have in common.

    An output of unknown length (NaN) has the usual length.
    """
    output_tokens = expected_output_tokens
    if math.isnan(output_tokens):
        output_tokens = found.output_tokens
    return Request(isl_tokens, output_tokens, now_s, queueing_part(found), found.requests_per_s,
                   found.own_part, followers_of(found), found.reuse)  # fmt: skip


@device
def write_parts(parts: Array, i: int, predicted: Parts, cost_s: float) -> None:
    """Write a candidate's parts, with its final cost."""
    for part in range(PARTS):
        parts[i, part] = predicted[part]
    parts[i, COST_S] = cost_s


@device
def write_costs(
    values: Array,
    isl_tokens: float,
    expected_output_tokens: float,
    now_s: float,
    weights: Array,
    parts: Array,
    costs: Array,
) -> int:
    """Write every candidate's cost, and its parts if wanted; return the first of the cheapest."""
    booked = np.empty(len(values))
    found = survey(values, isl_tokens, weights, booked)
    request = request_of(found, isl_tokens, expected_output_tokens, now_s)
    best = 0
    for i in range(len(values)):
        row = values[i]
        saved = saved_tokens(row, booked[i], weights)
        new_tokens = 0.0 if row[DECODE_SIDE] else max(isl_tokens - saved, 1.0)
        predicted = predict(row, booked[i], new_tokens, request, weights)
        costs[i] = predicted.cost_s * (1.0 - trial(row, found.placements, len(values)))
        if i < len(parts):
            write_parts(parts, i, predicted, costs[i])
        if costs[i] < costs[best]:
            best = i
    return best


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
def write_lacking(values: Array, isl_tokens: float, weights: Array, lacking: Array) -> None:
    """Write the tokens of a shared beginning that each candidate lacks.

    Prompts of other routers may begin as this one does. What two candidates have of it counts as
    shared; what one alone has may be a conversation of its own.
    """
    longest, shared = 0.0, 0.0
    for i in range(len(values)):
        saved = saved_tokens(values[i], booked_blocks(values[i], isl_tokens), weights)
        lacking[i] = saved
        shared = max(shared, min(saved, longest))
        longest = max(longest, saved)
    for i in range(len(values)):
        lacking[i] = max(shared - lacking[i], 0.0)


@device
def make_average(row: Array) -> None:
    """Replace the request's terms by those of one with nothing cached, booked or preferred."""
    row[OVERLAP_DEVICE : CACHED_BLOCKS + 1] = 0.0
    row[NEW_BLOCKS] = math.inf
    row[TAINT_FACTOR] = 1.0


@device
def claim(
    values: Array,
    slots: Slots,
    turns: Array,
    estimate: Array,
    ours: Array,
    isl_tokens: float,
    now_s: float,
    weights: Array,
    claimed: Array,
) -> None:
    """Add the expected placements of other routers to `claimed`, which is a copy of `values`.

    `values` is modified too: first our unseen bookings are removed, which gives the view that all
    routers share, then each placement is added. In each turn an average request, with nothing but
    a shared beginning cached, is placed on the cheapest candidate. O(candidates · turns).
    """
    lacking = np.empty(len(values))
    write_lacking(values, isl_tokens, weights, lacking)
    bookings = estimate[BOOKINGS]
    tokens, contexts = estimate[TOKENS] / bookings, estimate[CONTEXTS] / bookings
    isl_tokens = estimate[ISL_TOKENS] / bookings
    withdraw_ours(values, slots, estimate, ours, now_s)
    for i in range(len(values)):
        make_average(values[i])
    delay_weight, weights = weights[DELAY_WEIGHT], np.zeros(len(weights))
    weights[DELAY_WEIGHT] = delay_weight
    weights[MOST_TTFT_S] = weights[MOST_TPOT_S] = math.inf
    costs = np.empty(len(values))
    found = survey(values, isl_tokens, weights, costs)
    request = request_of(found, isl_tokens, math.nan, now_s)
    for i in range(len(values)):
        costs[i] = predict(values[i], 0.0, tokens + lacking[i], request, weights).cost_s
    for turn in range(len(turns)):
        best = costs.argmin()
        weight, new_tokens = turns[turn], tokens + lacking[best]
        if weight > 0:
            put(claimed[best], weight, new_tokens, contexts, isl_tokens, now_s)
        put(values[best], weight if weight > 0 else 1.0, new_tokens, contexts, isl_tokens, now_s)
        costs[best] = predict(values[best], 0.0, new_tokens, request, weights).cost_s


@kernel(
    "Tuple((int64, int64, float64))(float64[:, ::1], int64[::1], float64, float64, float64,"
    " float64[::1], float64[::1], float64[:, ::1], float64[:, ::1], float64[::1])"
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
    costs: Array,
) -> tuple[int, int, float]:
    """Write every candidate's cost; return the cheapest, and which are as good.

    Returns the first of the cheapest, the number of candidates that are as good, and the highest
    cost of those. Without other routers these cost exactly as much; else all within one standard
    error; where routers take turns there is one.

    `slots`: of the candidates in the rank table. `weights`: see `_predicted_parts`. `estimate`: of
    other routers, empty without any; `ours`: our bookings. `parts`: written for the rows it has.
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
            isl_tokens,
            now_s,
            weights,
            counted,
        )
    best = write_costs(counted, isl_tokens, expected_output_tokens, now_s, weights, parts, costs)
    error = terms[best, RELATIVE_ERROR] if len(estimate) and not taken else 0.0
    most = costs[best] * (1.0 + error)
    ties = 0
    for i in range(len(costs)):
        ties += costs[i] <= most
    return best, 1 if taken else ties, most


@kernel("void(float64[:, ::1], float64[:, ::1], float64, float64, float64[:, ::1])")
def weigh_parts(
    values: Array, seconds: Array, now_s: float, delay_weight: float, weighted: Array
) -> None:
    """Write the summands of every candidate's cost, from the parts that `price` wrote.

    Columns: the parts, weighted; the slow start; the change by the preference factor; that by the
    trial.
    """
    placements = values[:, PLACED_AT].max()
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
