"""Batches of engine events as rows of words, for `engine_events.py`: what Python calls.

    [timestamp, [event, …], rank]

A row is made of every event, good or not; consecutive removals that differ in their hashes only
share one. Tokens and hashes of the whole batch lie in one array each; a row says where its own are.
What is read of an event that turns out to be malformed is taken back.
"""

import numpy as np
import numpy.typing as npt

from router.compiled import device, halves_at, kernel, words_at
from router.publisher._engine_event import read_event
from router.publisher._engine_rows import (
    BLOCK_HASHES,
    EVENT,
    GROUP,
    HASH_COUNT,
    KIND,
    LOCALITY,
    MEDIUM,
    RANK,
    REASON,
    REMOVED,
    ROW_COUNT,
    SEEN,
    TOKEN_COUNT,
    Batch,
    Rows,
    row_at,
    value_of,
)
from router.publisher._msgpack import (
    LIST,
    NATURAL,
    NIL,
    Halves,
    Words,
    head_at,
    same_bytes,
    skip,
)

NO_BATCH, TRUNCATED, BAD_RANK, TRAILING = -1, -2, -3, -4
"""What is wrong with a whole batch."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_MAX_RANK = np.uint64(65_535)


@device
def _is_same_text(batch: Batch, one: Words, other: Words, field: np.uint64) -> bool:
    first, last = value_of(field), value_of(field) + _1
    length = one[last] - one[first]
    if length != other[last] - other[first]:
        return False
    return same_bytes(batch.start + one[first], batch.start + other[first], length)


@device
def _joins(batch: Batch, place: np.uint64) -> bool:
    """Is this row a removal that goes on from the row before? Then it becomes part of it."""
    if place == _0:
        return False
    row, before = row_at(batch, place), row_at(batch, place - _1)
    first, count = value_of(BLOCK_HASHES), value_of(BLOCK_HASHES) + _1
    if (
        before[KIND] != REMOVED
        or before[REASON]
        or (before[SEEN] ^ row[SEEN]) & ~(_1 << GROUP)  # nil is group 0
        or before[value_of(GROUP)] != row[value_of(GROUP)]
        or before[first] + before[count] != row[first]
        or not _is_same_text(batch, before, row, MEDIUM)
        or not _is_same_text(batch, before, row, LOCALITY)
    ):
        return False
    before[count] += row[count]
    return True


@device
def _read_row(batch: Batch, at: np.uint64, event: np.uint64) -> np.uint64:
    """Make a row of an event; where the event ends, 0: the bytes end within it."""
    totals = batch.totals
    tokens_before, hashes_before = totals[TOKEN_COUNT], totals[HASH_COUNT]
    row = row_at(batch, totals[ROW_COUNT])
    row[EVENT] = event
    after = read_event(batch, row, at)
    if after == _0:
        totals[TOKEN_COUNT], totals[HASH_COUNT] = tokens_before, hashes_before
        after = skip(at, batch.end)
    elif row[KIND] == REMOVED and _joins(batch, totals[ROW_COUNT]):
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
    """How many events a batch says it has, or NO_BATCH.

    Into `head`: how many elements the batch has, and where the first event begins.
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
    " Array(uint64, 2, 'C'), Array(uint32, 1, 'C'), Array(uint64, 1, 'C'), Array(uint64, 1, 'C'))"
)
def read_batch(
    payload: npt.NDArray[np.uint8],
    elements: int,
    offset: int,
    event_count: int,
    max_blocks: int,
    rows: Rows,
    tokens: Halves,
    hashes: Words,
    totals: Words,
) -> int:
    """Fill rows, tokens, hashes and totals from an opened batch; 0, or what is wrong with it.

    There must be a zeroed row for every event, and room for a token and a hash for every byte.
    """
    start = np.uint64(payload.ctypes.data)
    end = start + np.uint64(len(payload))
    batch = Batch(
        start,
        end,
        np.uint64(max_blocks),
        np.uint64(rows.ctypes.data),
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
