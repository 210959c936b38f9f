"""The estimate of other routers' placements: what bookings add to it, and the turns it implies.

One array has the sums, then a number for each other router, in order of ids. Another one has a row
for each of our bookings that is not yet known to all, oldest first; rows are only appended.
"""

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, kernel

Floats = npt.NDArray[np.float64]

SPREAD_S = 0.025
"""Time after which every router knows of a booking: the interval of frames, and the transfer."""

MEMORY = 0.99
"""Decay of all sums with each booking."""

LEAST_EXPECTED = 0.5
"""Least number of unseen requests of others, on average, that is taken into account."""

MOST_TURNS = 64

# The estimate: decayed sums over recent bookings, the number of other routers with a lower id, our
# rows in use, and for each other router the number of its bookings received within twice SPREAD_S
# after one of ours, summed over ours.
OURS = 0
BOOKINGS, TOKENS, CONTEXTS, ISL_TOKENS = 1, 2, 3, 4  # of all routers: their number and their sizes
LOWER_IDS = 5
FIRST, END = 6, 7
RECEIVED = 8

# Columns of our bookings: tokens to compute, n · (cached + n / 2), and the time.
SLOT, ROW_TOKENS, ROW_CONTEXTS, BOOKED_S = 0, 1, 2, 3
ROW_COLUMNS = 4


@device
def _forget(estimate: Floats, ours: Floats, now_s: float) -> None:
    """Forget our bookings that every router has long known of."""
    first, end = int(estimate[FIRST]), int(estimate[END])
    while first < end and now_s - ours[first, BOOKED_S] > 2 * SPREAD_S:
        first += 1
    estimate[FIRST] = first


@device
def _note_size(estimate: Floats, isl_tokens: float, cached_tokens: float) -> tuple[float, float]:
    """Add a booking to the sums of sizes; return its tokens to compute, and their contexts."""
    tokens = max(isl_tokens - cached_tokens, 0.0)
    contexts = tokens * (cached_tokens + tokens / 2)
    estimate[BOOKINGS] = estimate[BOOKINGS] * MEMORY + 1
    estimate[TOKENS] = estimate[TOKENS] * MEMORY + tokens
    estimate[CONTEXTS] = estimate[CONTEXTS] * MEMORY + contexts
    estimate[ISL_TOKENS] = estimate[ISL_TOKENS] * MEMORY + isl_tokens
    return tokens, contexts


@kernel("boolean(float64[::1], float64[:, ::1], int64, float64, float64, float64)")
def note_ours(
    estimate: Floats,
    ours: Floats,
    slot: int,
    isl_tokens: float,
    cached_tokens: float,
    now_s: float,
) -> bool:
    """Record a booking of ours on a slot. Returns False, and records nothing, if `ours` is full."""
    _forget(estimate, ours, now_s)
    end = int(estimate[END])
    if end == len(ours):
        return False
    estimate[OURS] = estimate[OURS] * MEMORY + 1
    for i in range(RECEIVED, len(estimate)):
        estimate[i] *= MEMORY
    row = ours[end]
    row[ROW_TOKENS], row[ROW_CONTEXTS] = _note_size(estimate, isl_tokens, cached_tokens)
    row[SLOT], row[BOOKED_S] = slot, now_s
    estimate[END] = end + 1
    return True


@kernel("void(float64[::1], float64[:, ::1], int64, int64[:, ::1], float64)")
def note_theirs(
    estimate: Floats, ours: Floats, number: int, sizes: npt.NDArray[np.int64], now_s: float
) -> None:
    """Record new bookings of another router, the one with this number in order of ids.

    `sizes`: rows {prompt tokens, cached tokens}.
    """
    _forget(estimate, ours, now_s)
    for i in range(len(sizes)):
        estimate[RECEIVED + number] += estimate[END] - estimate[FIRST]
        _note_size(estimate, sizes[i, 0], sizes[i, 1])


@device
def _expected(estimate: Floats) -> Floats:
    """Return how many requests each other router places per request of ours, on average."""
    expected = np.zeros(len(estimate) - RECEIVED)
    for i in range(len(expected)):
        if estimate[OURS] > 0:
            expected[i] = estimate[RECEIVED + i] / estimate[OURS]
    return expected


@kernel("int64(float64[::1], float64[::1])")
def write_turns(estimate: Floats, turns: Floats) -> int:
    """Write the weight of each turn, at most MOST_TURNS; return their number.

    The weight is the probability of the expected request: rounds of all routers, in order of ids,
    in which ours is 0. There are none if fewer than LEAST_EXPECTED requests are expected.
    """
    expected, lower = _expected(estimate), estimate[LOWER_IDS]
    total = 0.0
    for i in range(len(expected)):
        total += expected[i]
    taken = done = 0
    while total >= LEAST_EXPECTED and expected.max() > done:
        for turn in range(len(expected) + 1):
            weight = 0.0
            if turn != lower:
                weight = min(expected[turn - int(turn > lower)] - done, 1.0)
            if weight > 0 or turn == lower:
                turns[taken] = weight
                taken += 1
            if taken == MOST_TURNS:
                return taken
        done += 1
    return taken
