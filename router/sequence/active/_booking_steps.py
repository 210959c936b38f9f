"""The load of the ranks: the requests booked on each, in arrays, and the steps that change it.

A block of a prompt is counted once for all requests that share it. A trailing incomplete block and
every output block belong to one request alone. A block that only one request holds may be weighted
by a fraction, as its output nears the expected length. Source: Dynamo's `ActiveSequences` (1.0.2).

    active blocks = round(shared + Σ own − Σ (1 − fraction) over fractional blocks)

Prompts are computed in the order in which they were booked, and a block that an earlier one of the
slot has is not computed again: engines look a prompt up when its turn comes. Queued tokens are
those left to compute by that rule; prefill tokens are counted as Dynamo counts them. The oldest
incomplete prompt is the head; the time since it became the head bounds its progress. After its
predicted duration a prompt may be assumed complete: its tokens stay until its completion is
reported, but it is no longer queued, and its request counts as decoding. A prompt takes the time
that its engine is predicted to take for it alone. Source: Dynamo 1.6.1,
`router_prefill_load_model`, with times from a simulator; ours are learned.

A kernel that changes a slot ends with `write_load`: decisions read the rank table.
"""

import math

import numpy as np

from router.runtime.kernels.numba_runtime import device, float_rows_at
from router.sequence import rank_table as table
from router.sequence.active._booking_rows import (
    ADDRESS,
    BESIDE_REQUESTS,
    BESIDE_TOKENS,
    BOOKING_COLUMNS,
    BOOKING_FIGURES,
    BOOKING_FIGURES_COLUMNS,
    BOOKINGS,
    CAPACITY,
    FIRST_TOKEN_COLUMNS,
    FIRST_TOKEN_CONTEXTS,
    FIRST_TOKEN_SLOT,
    FIRST_TOKEN_TOKENS,
    FIRST_TOKENS,
    FIRST_TOKENS_COUNT,
    GROWING,
    KIND_WORDS,
    MICRO,
    MOST_FIRST_TOKENS,
    NEWEST,
    OLDEST,
    ROOT,
    SHARED_BLOCKS,
    SLOT_DISCOUNT_MICRO,
    SLOT_FIGURES,
    SLOT_FIGURES_COLUMNS,
    WAITED_S,
    Floats,
    Ints,
    Trie,
    hash_at,
    rows_of,
)

# Columns of a booking. Bookings of a slot, its queued prompts, and ours by expiry are linked lists.
SLOT, END, PROMPT = 0, 1, 2
OWN_BLOCKS, FIRST_OWN_BLOCKS = 3, 4  # blocks that are not shared: now, and when it was booked
KV_TOKENS, PREFILL_TOKENS, BLOCK_SIZE, EXPECTED_TOKENS = 5, 6, 7, 8
OWN_DISCOUNT_MICRO, IN_FLIGHT_BLOCKS = 9, 10
STAGE = 11
NEXT_QUEUED, PREVIOUS_QUEUED = 12, 13
NEXT_BOOKED, PREVIOUS_BOOKED = 14, 15
NEXT_TO_EXPIRE, PREVIOUS_TO_EXPIRE = 16, 17
UNSHARED_TOKENS = 18  # of PREFILL_TOKENS, those that no earlier booking on the slot computes

CONTEXTS, BOOKED_S, DECAY_FRACTION, EXPIRES_S, REPORTED_S = 0, 1, 2, 3, 4
BESIDE, BESIDE_KV = (
    5,
    6,
)  # requests that decoded when it was booked, NaN if a prompt was ahead of it
TOKEN_S = 7  # the time from its booking to its first token, NaN if unknown or noted already

QUEUED, ASSUMED_COMPLETE, COMPLETE = 1, 2, 3

# Columns of a slot, after those of the trie.
SLOT_OWN_BLOCKS, ACTIVE_PREFILL_TOKENS, QUEUED_TOKENS, DECODING_KV_TOKENS = 2, 3, 4, 5
REQUESTS, QUEUED_REQUESTS, GROWING_REQUESTS = 6, 7, 8
FIRST_QUEUED, LAST_QUEUED, FIRST_BOOKED, LAST_BOOKED = 9, 10, 11, 12

QUEUED_CONTEXTS, HEAD_SINCE_S, GROWING_SINCE_S = 0, 1, 2

# All requests ever booked on a slot: their number, the prompt tokens to compute and their attention
# work, their whole prompts, and the output that callers expect, of those that expect one.
ARRIVED_REQUESTS, ARRIVED_TOKENS, ARRIVED_CONTEXTS, ARRIVED_ISL_TOKENS = 3, 4, 5, 6
ARRIVED_EXPECTED_TOKENS, ARRIVED_EXPECTING = 7, 8


@device
def figures_of(state: Ints, kind: int, columns: int) -> Floats:
    at = kind * KIND_WORDS
    return float_rows_at(state[at + ADDRESS], state[at + CAPACITY], columns)


@device
def write_load(state: Ints, trie: Trie, ranks: Floats, slot: int) -> None:
    """Write the booked load of a slot to the rank table."""
    load, figures = trie.slots[slot], figures_of(state, SLOT_FIGURES, SLOT_FIGURES_COLUMNS)[slot]
    row, head = ranks[slot], load[FIRST_QUEUED]
    blocks = (load[SHARED_BLOCKS] + load[SLOT_OWN_BLOCKS]) * MICRO - load[SLOT_DISCOUNT_MICRO]
    row[table.PREFILL_TOKENS] = load[ACTIVE_PREFILL_TOKENS]
    row[table.QUEUED_TOKENS] = load[QUEUED_TOKENS]
    row[table.QUEUED_CONTEXTS] = figures[QUEUED_CONTEXTS]
    row[table.HEAD_TOKENS] = row[table.HEAD_CONTEXTS] = row[table.HEAD_SINCE_S] = 0.0
    if head:
        bookings = rows_of(state, BOOKINGS, BOOKING_COLUMNS)
        row[table.HEAD_TOKENS] = bookings[head, UNSHARED_TOKENS]
        row[table.HEAD_CONTEXTS] = booked(state)[head, CONTEXTS]
        row[table.HEAD_SINCE_S] = figures[HEAD_SINCE_S]
    row[table.DECODE_BLOCKS] = (blocks + MICRO // 2) // MICRO  # halves up, as the source does
    row[table.REQUESTS] = load[REQUESTS]
    row[table.DECODING_REQUESTS] = load[REQUESTS] - load[QUEUED_REQUESTS]
    row[table.DECODING_KV_TOKENS] = load[DECODING_KV_TOKENS]
    row[table.GROWING_REQUESTS] = load[GROWING_REQUESTS]
    row[table.GROWING_SINCE_S] = figures[GROWING_SINCE_S]


@device
def booked(state: Ints) -> Floats:
    return figures_of(state, BOOKING_FIGURES, BOOKING_FIGURES_COLUMNS)


# ── Lists ────────────────────────────────────────────────────────────────────────────────────────


@device
def append(bookings: Ints, ends: Ints, first: int, last: int, following: int, booking: int) -> None:
    """Append a booking to a list. `following`: the column of the next one; the one before is next.

    `ends[first]`, `ends[last]`: the ends of the list.
    """
    before = ends[last]
    bookings[booking, following] = 0
    bookings[booking, following + 1] = before
    if before:
        bookings[before, following] = booking
    else:
        ends[first] = booking
    ends[last] = booking


@device
def remove(bookings: Ints, ends: Ints, first: int, last: int, following: int, booking: int) -> None:
    """Remove a booking from a list; see `append`."""
    behind, before = bookings[booking, following], bookings[booking, following + 1]
    if before:
        bookings[before, following] = behind
    else:
        ends[first] = behind
    if behind:
        bookings[behind, following + 1] = before
    else:
        ends[last] = before


@device
def expire_later(state: Ints, bookings: Ints, booking: int, expires_s: float) -> None:
    """Move one of our reservations to the end of the expiry order. Others do not expire."""
    figures = booked(state)[booking]
    if not np.isnan(figures[EXPIRES_S]):
        figures[EXPIRES_S] = expires_s
        if state[NEWEST] != booking:
            remove(bookings, state, OLDEST, NEWEST, NEXT_TO_EXPIRE, booking)
            append(bookings, state, OLDEST, NEWEST, NEXT_TO_EXPIRE, booking)


# ── Steps of a booking ───────────────────────────────────────────────────────────────────────────


@device
def leave_queue(state: Ints, trie: Trie, bookings: Ints, booking: int, now_s: float) -> None:
    """Remove a prompt from the queue of its slot; the next one becomes the head."""
    slot = bookings[booking, SLOT]
    load, figures = trie.slots[slot], figures_of(state, SLOT_FIGURES, SLOT_FIGURES_COLUMNS)[slot]
    was_head = load[FIRST_QUEUED] == booking
    remove(bookings, load, FIRST_QUEUED, LAST_QUEUED, NEXT_QUEUED, booking)
    load[QUEUED_REQUESTS] -= 1
    load[QUEUED_TOKENS] -= bookings[booking, UNSHARED_TOKENS]
    figures[QUEUED_CONTEXTS] -= booked(state)[booking, CONTEXTS]
    load[DECODING_KV_TOKENS] += bookings[booking, KV_TOKENS]
    head = load[FIRST_QUEUED]
    if was_head and head:
        figures[HEAD_SINCE_S] = max(now_s, booked(state)[head, BOOKED_S])


@device
def mark_complete(state: Ints, trie: Trie, bookings: Ints, booking: int, now_s: float) -> None:
    """Mark a prompt as reported complete. Idempotent."""
    if bookings[booking, STAGE] == COMPLETE:
        return
    if bookings[booking, STAGE] == QUEUED:
        leave_queue(state, trie, bookings, booking, now_s)
    bookings[booking, STAGE] = COMPLETE
    load = trie.slots[bookings[booking, SLOT]]
    load[ACTIVE_PREFILL_TOKENS] -= bookings[booking, PREFILL_TOKENS]


@device
def note_beside(state: Ints, rank: Floats, load: Ints, booking: int) -> None:
    """Note what decodes beside a prompt that is about to be queued, if no prompt is ahead of it.

    Prompts of other sources are not known one by one: any request of theirs counts as a prompt.
    """
    figures = booked(state)[booking]
    figures[BESIDE] = figures[TOKEN_S] = np.nan
    is_ours = not np.isnan(figures[EXPIRES_S])
    if is_ours and not load[ACTIVE_PREFILL_TOKENS] and rank[table.FOREIGN_REQUESTS] <= 0:
        figures[BESIDE] = rank[table.DECODING_REQUESTS]
        figures[BESIDE_KV] = rank[table.DECODING_KV_TOKENS]


@device
def note_completed(state: Ints, ranks: Floats, bookings: Ints, booking: int) -> None:
    """Add a prompt that is complete to the sums of its rank."""
    row = ranks[bookings[booking, SLOT]]
    row[table.COMPLETED_TOKENS] += bookings[booking, UNSHARED_TOKENS]
    row[table.COMPLETED_CONTEXTS] += booked(state)[booking, CONTEXTS]


@device
def note_waited(
    state: Ints, trie: Trie, ranks: Floats, bookings: Ints, booking: int, now_s: float
) -> None:
    """Note the time to a first token if no other prompt was ahead, and none is behind.

    The step that ends a prompt also computes as much as has room of the prompts behind it.
    """
    row, figures = bookings[booking], booked(state)[booking]
    is_last = trie.slots[row[SLOT], ACTIVE_PREFILL_TOKENS] <= row[PREFILL_TOKENS]
    if is_last and not np.isnan(figures[BESIDE]):
        figures[TOKEN_S] = now_s - figures[BOOKED_S]
        if ranks[row[SLOT], table.TRUST_WEIGHT] >= 1.0:
            note_first_token(state, bookings, booking, -1)


@device
def note_first_token(state: Ints, bookings: Ints, booking: int, cached_tokens: int) -> None:
    """Keep the time to the first token of a prompt that had no other ahead of it, once.

    `cached_tokens`: what its engine found cached; negative: what was expected when it was booked.
    """
    figures, count = booked(state)[booking], state[FIRST_TOKENS_COUNT]
    tokens = float(bookings[booking, UNSHARED_TOKENS])
    if np.isnan(figures[TOKEN_S]) or tokens <= 0 or count >= MOST_FIRST_TOKENS:
        return
    if cached_tokens >= 0:
        isl_tokens = figures[CONTEXTS] / tokens + tokens / 2
        tokens = max(isl_tokens - cached_tokens, 1.0)
        figures[CONTEXTS] = tokens * (isl_tokens - tokens / 2)
    row = float_rows_at(state[FIRST_TOKENS], MOST_FIRST_TOKENS, FIRST_TOKEN_COLUMNS)[count]
    row[FIRST_TOKEN_SLOT], row[WAITED_S] = bookings[booking, SLOT], figures[TOKEN_S]
    row[FIRST_TOKEN_TOKENS], row[FIRST_TOKEN_CONTEXTS] = tokens, figures[CONTEXTS]
    row[BESIDE_REQUESTS], row[BESIDE_TOKENS] = figures[BESIDE], figures[BESIDE_KV]
    state[FIRST_TOKENS_COUNT] = count + 1
    figures[TOKEN_S] = np.nan


@device
def note_report(
    state: Ints, trie: Trie, bookings: Ints, booking: int, now_s: float, in_batch: bool
) -> None:
    """Record a report about a decoding request that grows unreported until the next one."""
    figures, slot = booked(state)[booking], bookings[booking, SLOT]
    is_growing = not np.isnan(figures[REPORTED_S])
    if not (in_batch or is_growing) or bookings[booking, STAGE] == QUEUED:
        return
    since = figures_of(state, SLOT_FIGURES, SLOT_FIGURES_COLUMNS)[slot]
    since[GROWING_SINCE_S] += now_s - (figures[REPORTED_S] if is_growing else 0.0)
    figures[REPORTED_S] = now_s
    if not is_growing:
        trie.slots[slot, GROWING_REQUESTS] += 1
        state[GROWING] += 1


@device
def forget_reports(state: Ints, trie: Trie, bookings: Ints, booking: int) -> None:
    figures, slot = booked(state)[booking], bookings[booking, SLOT]
    if np.isnan(figures[REPORTED_S]):
        return
    since = figures_of(state, SLOT_FIGURES, SLOT_FIGURES_COLUMNS)[slot]
    since[GROWING_SINCE_S] -= figures[REPORTED_S]
    trie.slots[slot, GROWING_REQUESTS] -= 1
    state[GROWING] -= 1
    if not trie.slots[slot, GROWING_REQUESTS]:
        since[GROWING_SINCE_S] = 0.0  # Removes the rounding error of the running sum.


@device
def hand_down(state: Ints, trie: Trie, bookings: Ints, booking: int) -> None:
    """Let the next prompt that shares blocks compute what a queued booking will not. O(queue).

    For a booking that ends before its prompt is computed. Prompts that share any block share their
    first.
    """
    if bookings[booking, END] == ROOT:
        return
    tokens, first = bookings[booking, UNSHARED_TOKENS], hash_at(trie, bookings[booking, PROMPT], 0)
    heir = bookings[booking, NEXT_QUEUED]
    while heir:
        row = bookings[heir]
        saved = row[PREFILL_TOKENS] - row[UNSHARED_TOKENS]
        if saved > 0 and row[END] != ROOT and hash_at(trie, row[PROMPT], 0) == first:
            add_unshared(state, trie, bookings, heir, min(tokens, saved))
            return
        heir = row[NEXT_QUEUED]


@device
def add_unshared(state: Ints, trie: Trie, bookings: Ints, booking: int, tokens: int) -> None:
    """Add tokens that a queued prompt has to compute itself."""
    slot, figures = bookings[booking, SLOT], booked(state)[booking]
    sums = figures_of(state, SLOT_FIGURES, SLOT_FIGURES_COLUMNS)[slot]
    row = bookings[booking]
    output_blocks = row[OWN_BLOCKS] - row[FIRST_OWN_BLOCKS]
    isl_tokens = row[KV_TOKENS] - output_blocks * row[BLOCK_SIZE]
    row[UNSHARED_TOKENS] += tokens
    trie.slots[slot, QUEUED_TOKENS] += tokens
    left = row[UNSHARED_TOKENS]
    sums[QUEUED_CONTEXTS] -= figures[CONTEXTS]
    figures[CONTEXTS] = left * (isl_tokens - left / 2)
    sums[QUEUED_CONTEXTS] += figures[CONTEXTS]


@device
def reusable_blocks(
    blocks: float, isl_tokens: float, block_size: float, dropped_blocks: float
) -> float:
    """Return how many of these leading blocks an engine reuses: it computes at least one token.

    `dropped_blocks`: those that it computes again in any case, 1 with EAGLE. Source: as of
    `footprint.reusable_blocks`.
    """
    most = math.floor(max(isl_tokens - 1, 0) / max(block_size, 1))
    return max(min(blocks, most) - dropped_blocks, 0)


@device
def prefill_s(rank: Floats, tokens: float, contexts: float) -> float:
    """Return the time of a prompt on a rank, with its present decode load."""
    decoding = rank[table.DECODING_REQUESTS]
    step_s = rank[table.BASE_S] + decoding * rank[table.DECODE_S]
    step_s += rank[table.DECODING_KV_TOKENS] * rank[table.KV_S]
    steps = max(tokens / max(rank[table.CHUNK_TOKENS] - decoding, 1.0), 1.0)
    work_s = tokens * rank[table.PREFILL_S] + contexts * rank[table.CONTEXT_S]
    return float(work_s + steps * step_s)
