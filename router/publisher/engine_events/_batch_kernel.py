"""Kernels that parse batches of engine events into rows of words; called by `decoder.py`.

    [timestamp, [event, …], rank]

Every event becomes a row, whether it is well-formed or not. Consecutive removals that differ only
in their hashes share one row, and so do consecutive stored events that differ only in blocks,
tokens and parents. Every stored event has a head: the index of its first block within its row, its
parent, and 1 if it has a parent. Tokens, hashes and heads of the whole batch lie in one array each;
a row contains the ranges that belong to it. Tokens and hashes read from an event that turns out to
be malformed are discarded.
"""

import numpy as np
import numpy.typing as npt

from router.publisher.engine_events._event_kernel import read_event
from router.publisher.engine_events._event_rows import (
    BLOCK_HASHES,
    BLOCK_SIZE,
    CACHE_SALT,
    EAGLE,
    EVENT,
    EXTRA_KEYS,
    FIRST_HEAD,
    GROUP,
    HASH_COUNT,
    HEAD_COUNT,
    HEADS,
    KIND,
    LOCALITY,
    LORA_ID,
    LORA_NAME,
    MEDIUM,
    PARENT,
    RANK,
    REASON,
    REMOVED,
    ROW_COUNT,
    SEEN,
    SPEC_KIND,
    STORED,
    TOKEN_COUNT,
    TOKEN_IDS,
    WINDOW,
    Batch,
    Rows,
    row_at,
    value_of,
)
from router.runtime.kernels._msgpack import (
    LIST,
    NATURAL,
    NIL,
    Halves,
    Words,
    head_at,
    same_bytes,
    skip,
)
from router.runtime.kernels.numba_runtime import device, halves_at, kernel, words_at

NO_BATCH, TRUNCATED, BAD_RANK, TRAILING = -1, -2, -3, -4
"""Errors that concern a whole batch."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_MAX_RANK = np.uint64(65_535)
_CONTEXT = (_1 << LORA_ID) | (_1 << LORA_NAME) | (_1 << CACHE_SALT) | (_1 << EXTRA_KEYS)
"""Fields that change the identity of blocks beyond their tokens: such events share no row."""


@device
def _is_same_text(batch: Batch, one: Words, other: Words, field: np.uint64) -> bool:
    first, last = value_of(field), value_of(field) + _1
    length = one[last] - one[first]
    if length != other[last] - other[first]:
        return False
    return same_bytes(batch.start + one[first], batch.start + other[first], length)


@device
def _is_behind(before: Words, row: Words, field: np.uint64) -> bool:
    """Return whether a row's hashes or tokens directly follow those of the previous row."""
    first, count = value_of(field), value_of(field) + _1
    return bool(before[first] + before[count] == row[first])


@device
def _goes_on(batch: Batch, before: Words, row: Words, free: np.uint64) -> bool:
    """Return whether this row is like the previous one, and its hashes directly follow.

    `free`: fields that may be absent or nil in one of the two rows.
    """
    return bool(
        before[KIND] == row[KIND]
        and not before[REASON]
        and not (before[SEEN] ^ row[SEEN]) & ~free
        and before[value_of(GROUP)] == row[value_of(GROUP)]
        and _is_behind(before, row, BLOCK_HASHES)
        and _is_same_text(batch, before, row, MEDIUM)
        and _is_same_text(batch, before, row, LOCALITY)
    )


@device
def _tokens_over(row: Words, blocks: np.uint64) -> np.uint64:
    """Return the event's tokens in excess of what `blocks` blocks need, modulo 2^64."""
    over: np.uint64 = row[value_of(TOKEN_IDS) + _1] - blocks * row[value_of(BLOCK_SIZE)]
    return over


@device
def _is_alike(batch: Batch, before: Words, row: Words) -> bool:
    """Return whether a stored event continues the stored events of the previous row."""
    blocks = row[value_of(BLOCK_HASHES) + _1]
    all_blocks = before[value_of(BLOCK_HASHES) + _1]
    if blocks == _0 or all_blocks == _0 or row[SEEN] & _CONTEXT:
        return False
    return bool(
        _goes_on(batch, before, row, (_1 << GROUP) | (_1 << PARENT))
        and _is_behind(before, row, TOKEN_IDS)
        and before[EAGLE] == row[EAGLE]
        and before[value_of(BLOCK_SIZE)] == row[value_of(BLOCK_SIZE)]
        and before[value_of(WINDOW)] == row[value_of(WINDOW)]
        and _tokens_over(before, all_blocks) == before[HEADS] * _tokens_over(row, blocks)
        and _is_same_text(batch, before, row, SPEC_KIND)
    )


@device
def _joins_removals(batch: Batch, place: np.uint64) -> bool:
    """Merge this row into the previous one if both are removals that can share a row."""
    if place == _0:
        return False
    row, before = row_at(batch, place), row_at(batch, place - _1)
    if not _goes_on(batch, before, row, _1 << GROUP):  # A nil group means group 0.
        return False
    before[value_of(BLOCK_HASHES) + _1] += row[value_of(BLOCK_HASHES) + _1]
    return True


@device
def _joins_stored(batch: Batch, place: np.uint64) -> bool:
    """Merge this row into the previous one if both are stored events that can share a row."""
    row, head = row_at(batch, place), _3 * np.uint64(batch.totals[HEAD_COUNT])
    row[FIRST_HEAD], row[HEADS] = batch.totals[HEAD_COUNT], _1
    batch.heads[head], batch.heads[head + _1] = _0, row[value_of(PARENT)]
    batch.heads[head + _2] = row[value_of(PARENT) + _1]
    batch.totals[HEAD_COUNT] += _1
    if place == _0 or not _is_alike(batch, row_at(batch, place - _1), row):
        return False
    before = row_at(batch, place - _1)
    batch.heads[head] = before[value_of(BLOCK_HASHES) + _1]
    before[HEADS] += _1
    before[value_of(BLOCK_HASHES) + _1] += row[value_of(BLOCK_HASHES) + _1]
    before[value_of(TOKEN_IDS) + _1] += row[value_of(TOKEN_IDS) + _1]
    return True


@device
def _read_row(batch: Batch, at: np.uint64, event: np.uint64) -> np.uint64:
    """Parse an event into a row. Returns its end address, or 0 if the bytes end within it."""
    totals = batch.totals
    tokens_before, hashes_before = totals[TOKEN_COUNT], totals[HASH_COUNT]
    row = row_at(batch, totals[ROW_COUNT])
    row[EVENT] = event
    after = read_event(batch, row, at)
    if after == _0:
        totals[TOKEN_COUNT], totals[HASH_COUNT] = tokens_before, hashes_before
        after = skip(at, batch.end)
    elif (row[KIND] == REMOVED and _joins_removals(batch, totals[ROW_COUNT])) or (
        row[KIND] == STORED and _joins_stored(batch, totals[ROW_COUNT])
    ):
        row[:] = _0
        return after
    totals[ROW_COUNT] += _1
    return after


@device
def _read_end(batch: Batch, at: np.uint64, elements: np.uint64) -> int:
    batch.totals[RANK] = ~_0
    if elements:
        kind, rank, after = head_at(at, batch.end)
        if kind == NATURAL and rank <= _MAX_RANK:
            batch.totals[RANK] = rank
        elif kind != NIL:
            return BAD_RANK
        at = after
    for _ in range(_1, elements):
        at = skip(at, batch.end)
        if at == _0:
            return TRUNCATED
    return 0 if at == batch.end else TRAILING


@kernel("int64(Array(uint8, 1, 'C', readonly=True), Array(uint64, 1, 'C'))")
def open_batch(payload: npt.NDArray[np.uint8], head: Words) -> int:
    """Return the number of events that a batch declares, or NO_BATCH.

    Writes the number of the batch's elements and the offset of the first event into `head`.
    """
    start = np.uint64(payload.ctypes.data)
    end = start + np.uint64(len(payload))
    kind, elements, at = head_at(start, end)
    if kind != LIST or elements < _2:
        return NO_BATCH
    at = skip(at, end)
    if at == _0:
        return NO_BATCH
    kind, count, at = head_at(at, end)
    if kind != LIST:
        return NO_BATCH
    head[0], head[1] = elements, at - start
    return int(count)


@kernel(
    "int64(Array(uint8, 1, 'C', readonly=True), uint64, uint64, uint64, uint64,"
    " Array(uint64, 2, 'C'), Array(uint64, 1, 'C'), Array(uint32, 1, 'C'), Array(uint64, 1, 'C'),"
    " Array(uint64, 1, 'C'))"
)
def read_batch(
    payload: npt.NDArray[np.uint8],
    elements: int,
    offset: int,
    event_count: int,
    max_blocks: int,
    rows: Rows,
    heads: Words,
    tokens: Halves,
    hashes: Words,
    totals: Words,
) -> int:
    """Parse an opened batch into the given arrays. Returns 0, or the error of the whole batch.

    Requires a zeroed row and a head for every event, and room for a token and a hash for every
    byte.
    """
    start = np.uint64(payload.ctypes.data)
    end = start + np.uint64(len(payload))
    batch = Batch(
        start,
        end,
        np.uint64(max_blocks),
        np.uint64(rows.ctypes.data),
        words_at(np.uint64(heads.ctypes.data), np.uint64(len(heads))),
        halves_at(np.uint64(tokens.ctypes.data), np.uint64(len(tokens))),
        words_at(np.uint64(hashes.ctypes.data), np.uint64(len(hashes))),
        words_at(np.uint64(totals.ctypes.data), np.uint64(len(totals))),
    )
    at = start + np.uint64(offset)
    for event in range(event_count):
        at = _read_row(batch, at, np.uint64(event))
        if at == _0:
            return TRUNCATED
    return _read_end(batch, at, np.uint64(elements) - _2)
