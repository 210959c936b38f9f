"""The kernels of bookings: from a request's booking to its end, and the progress of prompts."""

import numpy as np

from router.runtime.kernels.numba_runtime import kernel
from router.sequence import rank_table as table
from router.sequence.active._booking_rows import (
    BOOKING_COLUMNS,
    BOOKINGS,
    HASHES,
    MICRO,
    NEWEST,
    OLDEST,
    PROMPTS,
    REFERENCES,
    SHARED_BLOCKS,
    SLOT_COLUMNS,
    SLOT_DISCOUNT_MICRO,
    SLOT_FIGURES,
    SLOT_FIGURES_COLUMNS,
    SLOTS,
    Floats,
    Ints,
    Words,
    free_rows,
    give_row,
    put,
    rows_of,
    take_row,
    trie_at,
)
from router.sequence.active._booking_steps import (
    ACTIVE_PREFILL_TOKENS,
    ARRIVED_CONTEXTS,
    ARRIVED_EXPECTED_TOKENS,
    ARRIVED_EXPECTING,
    ARRIVED_ISL_TOKENS,
    ARRIVED_REQUESTS,
    ARRIVED_TOKENS,
    ASSUMED_COMPLETE,
    BLOCK_SIZE,
    BOOKED_S,
    COMPLETE,
    CONTEXTS,
    DECAY_FRACTION,
    DECODING_KV_TOKENS,
    END,
    EXPECTED_TOKENS,
    EXPIRES_S,
    FIRST_BOOKED,
    FIRST_OWN_BLOCKS,
    FIRST_QUEUED,
    HEAD_SINCE_S,
    IN_FLIGHT_BLOCKS,
    KV_TOKENS,
    LAST_BOOKED,
    LAST_QUEUED,
    NEXT_BOOKED,
    NEXT_QUEUED,
    NEXT_TO_EXPIRE,
    OWN_BLOCKS,
    OWN_DISCOUNT_MICRO,
    PREFILL_TOKENS,
    PROMPT,
    QUEUED,
    QUEUED_CONTEXTS,
    QUEUED_REQUESTS,
    QUEUED_TOKENS,
    REPORTED_S,
    REQUESTS,
    SLOT,
    SLOT_OWN_BLOCKS,
    STAGE,
    UNSHARED_TOKENS,
    append,
    booked,
    expire_later,
    figures_of,
    forget_reports,
    hand_down,
    leave_queue,
    mark_complete,
    note_beside,
    note_completed,
    note_first_token,
    note_report,
    note_waited,
    prefill_s,
    remove,
    reusable_blocks,
    write_load,
)
from router.sequence.active._prompt_trie import (
    add_prompt,
    begun_with,
    free_prompts,
    has_room,
    release_prompt,
    remove_prompt,
    shared_way,
    weigh_prompt,
)

# ── Kernels ──────────────────────────────────────────────────────────────────────────────────────

_HASHES = "Array(uint64, 1, 'C', readonly=True, aligned=False)"


@kernel(
    f"UniTuple(int64, 2)(int64[::1], float64[:, ::1], int64, {_HASHES}, int64, int64, int64, int64,"
    " int64, float64, float64)"
)
def book(
    state: Ints,
    ranks: Floats,
    slot: int,
    hashes: Words,
    own_blocks: int,
    isl_tokens: int,
    cached_tokens: int,
    block_size: int,
    expected_tokens: int,
    now_s: float,
    expires_s: float,
) -> tuple[int, int]:
    """Book a request on a slot; return its booking and prompt, or zeros if there is no room.

    `expected_tokens`: of output, or 0. `expires_s`: NaN for a request of another router. The memory
    of `hashes` must stay until the prompt is freed. O(nodes on its path).
    """
    trie = trie_at(state)
    node, position = shared_way(trie, hashes)
    is_known = slot < len(trie.slots)
    has_rows = free_rows(state, BOOKINGS) and free_rows(state, PROMPTS)
    if not (is_known and has_rows and has_room(trie, node, position)):
        return 0, 0
    bookings, load = rows_of(state, BOOKINGS, BOOKING_COLUMNS), trie.slots[slot]
    prompt, booking = take_row(state, PROMPTS, trie.prompts), take_row(state, BOOKINGS, bookings)
    trie.prompts[prompt, HASHES] = np.int64(hashes.ctypes.data)
    trie.prompts[prompt, REFERENCES] = 1
    row, shared_before = bookings[booking], load[SHARED_BLOCKS]
    is_hybrid = ranks[slot, table.HYBRID]  # it resumes after a whole prompt, not in the middle
    begun_blocks = begun_with(trie, slot, node, position) if is_hybrid else 0
    row[SLOT], row[PROMPT] = slot, prompt
    row[END] = add_prompt(trie, slot, prompt, len(hashes), node, position)
    row[IN_FLIGHT_BLOCKS] = len(hashes) - (load[SHARED_BLOCKS] - shared_before)
    row[OWN_BLOCKS] = row[FIRST_OWN_BLOCKS] = own_blocks
    row[KV_TOKENS], row[BLOCK_SIZE], row[EXPECTED_TOKENS] = isl_tokens, block_size, expected_tokens
    tokens = max(isl_tokens - cached_tokens, 0)
    row[PREFILL_TOKENS], row[STAGE] = tokens, QUEUED
    figures, sums = booked(state)[booking], figures_of(state, SLOT_FIGURES, SLOT_FIGURES_COLUMNS)
    in_flight = float(begun_blocks if is_hybrid else row[IN_FLIGHT_BLOCKS])
    in_flight = reusable_blocks(in_flight, isl_tokens, block_size, 0)
    left = min(tokens, isl_tokens - in_flight * block_size)
    row[UNSHARED_TOKENS] = left
    figures[CONTEXTS] = left * (isl_tokens - left / 2)
    figures[BOOKED_S], figures[EXPIRES_S] = now_s, expires_s
    figures[DECAY_FRACTION] = figures[REPORTED_S] = np.nan
    note_beside(state, ranks[slot], load, booking)
    if not load[FIRST_QUEUED]:
        sums[slot, HEAD_SINCE_S] = now_s
    append(bookings, load, FIRST_QUEUED, LAST_QUEUED, NEXT_QUEUED, booking)
    append(bookings, load, FIRST_BOOKED, LAST_BOOKED, NEXT_BOOKED, booking)
    if not np.isnan(expires_s):
        append(bookings, state, OLDEST, NEWEST, NEXT_TO_EXPIRE, booking)
    load[REQUESTS] += 1
    load[QUEUED_REQUESTS] += 1
    load[SLOT_OWN_BLOCKS] += own_blocks
    load[ACTIVE_PREFILL_TOKENS] += tokens
    load[QUEUED_TOKENS] += left
    sums[slot, QUEUED_CONTEXTS] += figures[CONTEXTS]
    sums[slot, ARRIVED_REQUESTS] += 1
    sums[slot, ARRIVED_TOKENS] += left
    sums[slot, ARRIVED_CONTEXTS] += figures[CONTEXTS]
    sums[slot, ARRIVED_ISL_TOKENS] += isl_tokens
    sums[slot, ARRIVED_EXPECTED_TOKENS] += expected_tokens
    sums[slot, ARRIVED_EXPECTING] += expected_tokens > 0
    write_load(state, trie, ranks, slot)
    return booking, prompt


@kernel("void(int64[::1], float64[:, ::1], int64, float64, float64, boolean)")
def complete(
    state: Ints, ranks: Floats, booking: int, now_s: float, expires_s: float, in_batch: bool
) -> None:
    """Record that the prompt of a booking is complete, and renew its expiry."""
    trie, bookings = trie_at(state), rows_of(state, BOOKINGS, BOOKING_COLUMNS)
    expire_later(state, bookings, booking, expires_s)
    if bookings[booking, STAGE] != COMPLETE:
        note_completed(state, ranks, bookings, booking)
        if not in_batch:
            note_waited(state, trie, ranks, bookings, booking, now_s)
    mark_complete(state, trie, bookings, booking, now_s)
    note_report(state, trie, bookings, booking, now_s, in_batch)
    write_load(state, trie, ranks, bookings[booking, SLOT])


@kernel("void(int64[::1], float64[:, ::1], int64, int64, float64, float64, float64, boolean)")
def add_output(
    state: Ints,
    ranks: Floats,
    booking: int,
    blocks: int,
    decay_fraction: float,
    now_s: float,
    expires_s: float,
    in_batch: bool,
) -> None:
    """Add output blocks to a booking, and renew its expiry.

    `decay_fraction`: the new weight of every block that only this request holds. If NaN, it is
    the remaining part of the expected output, if a length is expected.
    """
    trie, bookings = trie_at(state), rows_of(state, BOOKINGS, BOOKING_COLUMNS)
    row, slot = bookings[booking], bookings[booking, SLOT]
    load, figures = trie.slots[slot], booked(state)[booking]
    expire_later(state, bookings, booking, expires_s)
    row[OWN_BLOCKS] += blocks
    load[SLOT_OWN_BLOCKS] += blocks
    row[KV_TOKENS] += blocks * row[BLOCK_SIZE]
    if row[STAGE] != QUEUED:
        load[DECODING_KV_TOKENS] += blocks * row[BLOCK_SIZE]
    if np.isnan(decay_fraction) and row[EXPECTED_TOKENS]:
        output_tokens = (row[OWN_BLOCKS] - row[FIRST_OWN_BLOCKS]) * row[BLOCK_SIZE]
        decay_fraction = max(0.0, 1 - output_tokens / row[EXPECTED_TOKENS])
    if not np.isnan(decay_fraction):
        figures[DECAY_FRACTION] = decay_fraction
        discount_micro = MICRO - np.int64(np.rint(decay_fraction * MICRO))
        load[SLOT_DISCOUNT_MICRO] -= row[OWN_DISCOUNT_MICRO]
        row[OWN_DISCOUNT_MICRO] = row[OWN_BLOCKS] * discount_micro
        load[SLOT_DISCOUNT_MICRO] += row[OWN_DISCOUNT_MICRO]
        weigh_prompt(trie, slot, row[END], int(discount_micro))
    note_report(state, trie, bookings, booking, now_s, in_batch)
    write_load(state, trie, ranks, slot)


@kernel("void(int64[::1], int64, float64)")
def renew(state: Ints, booking: int, expires_s: float) -> None:
    """Renew the expiry of a booking."""
    expire_later(state, rows_of(state, BOOKINGS, BOOKING_COLUMNS), booking, expires_s)


@kernel("UniTuple(int64, 3)(int64[::1], float64[:, ::1], int64, float64, int64)")
def free(
    state: Ints, ranks: Floats, booking: int, now_s: float, cached_tokens: int
) -> tuple[int, int, int]:
    """End a booking. O(nodes on its path).

    `cached_tokens`: the cached part of its prompt, as its engine reports it; -1: not reported.
    Returns 1 if its prompt was reported complete, and the result of `free_prompts`.
    """
    trie, bookings = trie_at(state), rows_of(state, BOOKINGS, BOOKING_COLUMNS)
    row, slot = bookings[booking], bookings[booking, SLOT]
    load, was_complete = trie.slots[slot], bookings[booking, STAGE] == COMPLETE
    if cached_tokens >= 0:
        note_first_token(state, bookings, booking, cached_tokens)
    forget_reports(state, trie, bookings, booking)
    if row[STAGE] == QUEUED:
        hand_down(state, trie, bookings, booking)
    mark_complete(state, trie, bookings, booking, now_s)
    load[REQUESTS] -= 1
    load[DECODING_KV_TOKENS] -= row[KV_TOKENS]
    load[SLOT_OWN_BLOCKS] -= row[OWN_BLOCKS]
    load[SLOT_DISCOUNT_MICRO] -= row[OWN_DISCOUNT_MICRO]
    remove(bookings, load, FIRST_BOOKED, LAST_BOOKED, NEXT_BOOKED, booking)
    if not np.isnan(booked(state)[booking, EXPIRES_S]):
        remove(bookings, state, OLDEST, NEWEST, NEXT_TO_EXPIRE, booking)
    remove_prompt(trie, slot, row[END])
    release_prompt(trie, row[PROMPT])
    give_row(state, BOOKINGS, bookings, booking)
    write_load(state, trie, ranks, slot)
    first, second = free_prompts(trie)
    return int(was_complete), first, second


@kernel("Tuple((boolean, int64, float64))(int64[::1], int64)")
def reported(state: Ints, booking: int) -> tuple[bool, int, float]:
    """Return whether the prompt is reported complete, its output blocks, their weight or NaN."""
    row = rows_of(state, BOOKINGS, BOOKING_COLUMNS)[booking]
    output_blocks = int(row[OWN_BLOCKS] - row[FIRST_OWN_BLOCKS])
    return row[STAGE] == COMPLETE, output_blocks, booked(state)[booking, DECAY_FRACTION]


@kernel("int64(int64[::1], float64)")
def overdue(state: Ints, now_s: float) -> int:
    """Return the reservation that expires first, if it has expired, or 0."""
    oldest = state[OLDEST]
    return int(oldest) if oldest and booked(state)[oldest, EXPIRES_S] <= now_s else 0


@kernel("int64(int64[::1], int64, int64[::1])")
def list_bookings(state: Ints, slot: int, found: Ints) -> int:
    """Write the bookings of a slot, oldest first; slot -1: ours, the next to expire first.

    Returns their number, of which `found` has the first.
    """
    bookings, column = rows_of(state, BOOKINGS, BOOKING_COLUMNS), NEXT_BOOKED
    booking = state[OLDEST]
    if slot < 0:
        column = NEXT_TO_EXPIRE
    else:
        booking = rows_of(state, SLOTS, SLOT_COLUMNS)[slot, FIRST_BOOKED]
    count = 0
    while booking:
        if count < len(found):
            found[count] = booking
        count += 1
        booking = bookings[booking, column]
    return count


@kernel("void(int64[::1], int64[::1], boolean)")
def refill(state: Ints, rows: Ints, are_nodes: bool) -> None:
    """Store nodes, or uses, in a hash table that is empty."""
    trie = trie_at(state)
    for row in rows:
        if are_nodes:
            put(trie.children, row)
        else:
            put(trie.places, row)


@kernel("void(int64[::1], float64[:, ::1], float64)")
def end_overdue(state: Ints, ranks: Floats, now_s: float) -> None:
    """Assume complete all prompts with a predicted duration that has passed.

    O(slots + those prompts).
    """
    trie, bookings = trie_at(state), rows_of(state, BOOKINGS, BOOKING_COLUMNS)
    sums = figures_of(state, SLOT_FIGURES, SLOT_FIGURES_COLUMNS)
    for slot in range(min(len(ranks), len(trie.slots))):
        load, rank = trie.slots[slot], ranks[slot].copy()
        while load[FIRST_QUEUED]:
            head = load[FIRST_QUEUED]
            contexts = booked(state)[head, CONTEXTS]
            ended_s = sums[slot, HEAD_SINCE_S]
            ended_s += prefill_s(rank, bookings[head, UNSHARED_TOKENS], contexts)
            if ended_s > now_s:
                break
            leave_queue(state, trie, bookings, head, ended_s)
            bookings[head, STAGE] = ASSUMED_COMPLETE
            write_load(state, trie, ranks, slot)


@kernel("void(int64[::1], float64[:, ::1], int64[::1], float64)")
def subtract_progress(state: Ints, rows: Floats, slots: Ints, now_s: float) -> None:
    """Subtract from these rows what the engines of these slots should have computed by now.

    `rows`: copies of rows of the rank table, or terms made of them. A prompt starts when it is
    booked and the prompt before it is complete. O(prompts being computed).
    """
    bookings = rows_of(state, BOOKINGS, BOOKING_COLUMNS)
    loads = rows_of(state, SLOTS, SLOT_COLUMNS)
    sums = figures_of(state, SLOT_FIGURES, SLOT_FIGURES_COLUMNS)
    for i in range(len(rows)):
        row, slot, head = rows[i], slots[i], 0
        if slot < len(loads):
            head = loads[slot, FIRST_QUEUED]
        if not head or row[table.HEAD_TOKENS] <= 0:
            continue
        left_tokens, left_contexts = row[table.QUEUED_TOKENS], row[table.QUEUED_CONTEXTS]
        left_prefill_tokens = row[table.PREFILL_TOKENS]
        begun_s, rank = sums[slot, HEAD_SINCE_S], row.copy()
        row[table.HEAD_TOKENS] = row[table.HEAD_CONTEXTS] = 0.0
        while head:
            tokens, contexts = bookings[head, UNSHARED_TOKENS], booked(state)[head, CONTEXTS]
            begun_s = max(begun_s, booked(state)[head, BOOKED_S])
            took_s = prefill_s(rank, tokens, contexts)
            if now_s < begun_s + took_s:
                done = max(now_s - begun_s, 0.0) / took_s
                left_tokens -= done * tokens
                left_prefill_tokens -= done * bookings[head, PREFILL_TOKENS]
                left_contexts -= done * contexts
                row[table.HEAD_TOKENS] = (1 - done) * tokens
                row[table.HEAD_CONTEXTS] = (1 - done) * contexts
                break
            begun_s += took_s
            left_tokens -= tokens
            left_prefill_tokens -= bookings[head, PREFILL_TOKENS]
            left_contexts -= contexts
            head = bookings[head, NEXT_QUEUED]
        if not head:
            left_tokens = left_prefill_tokens = left_contexts = 0.0
        row[table.QUEUED_TOKENS], row[table.PREFILL_TOKENS] = left_tokens, left_prefill_tokens
        row[table.QUEUED_CONTEXTS] = left_contexts
        row[table.HEAD_SINCE_S] = now_s
