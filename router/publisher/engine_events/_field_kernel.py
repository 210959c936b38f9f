"""The fields of engine events: the expected type of each, and its conversion into a row."""

import numpy as np

from router.publisher.engine_events._event_rows import (
    BLOCK_HASHES,
    BLOCK_SIZE,
    EAGLE,
    EXTRA_KEYS,
    GROUP,
    HARMLESS,
    HASH_COUNT,
    LOCALITY,
    LORA_ID,
    MEDIUM,
    NO_HASH,
    NO_LIST,
    NO_NUMBER,
    NO_PAIR,
    NO_TEXT,
    NO_TOKEN,
    PARENT,
    REMOVED,
    STORED,
    TOKEN_COUNT,
    TOKEN_IDS,
    TOO_MANY,
    TYPE,
    WINDOW,
    Batch,
    forget,
    note,
    refuse,
)
from router.runtime.kernels._msgpack import (
    BINARY,
    LIST,
    NATURAL,
    NEGATIVE,
    NIL,
    STRING,
    Words,
    head_at,
    read_u32s,
    skip,
)
from router.runtime.kernels._xxh3 import hash_at, u8_at
from router.runtime.kernels.numba_runtime import device

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_U32_MAX = np.uint64(2**32 - 1)
_HASH_BYTES = np.uint64(32)
_NIL_CODE = np.uint8(0xC0)


@device
def is_read(kind: np.uint64, field: np.uint64) -> bool:
    """Return whether a field is read from events of a kind."""
    if kind == STORED:
        return bool(field != TYPE and field < HARMLESS)
    is_of_removal = field in (BLOCK_HASHES, MEDIUM, GROUP, LOCALITY)
    return bool(kind == REMOVED and is_of_removal)


@device
def _hash_of(kind: np.uint64, value: np.uint64, at: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return the end address of a hash and the hash; the address is 0 if it is no hash.

    A hash of 32 bytes is hashed again to 64 bits.
    """
    if kind in (NATURAL, NEGATIVE):
        return at, value
    if kind == BINARY and value == _HASH_BYTES:
        return at + value, hash_at(at, value, _0)
    return _0, _0


@device
def _read_parent(row: Words, kind: np.uint64, value: np.uint64, at: np.uint64) -> np.uint64:
    after, parent = _hash_of(kind, value, at)
    if after == _0:
        return refuse(row, PARENT, NO_HASH, _0)
    note(row, PARENT, parent, _1)
    return after


@device
def _read_hashes(
    batch: Batch, row: Words, kind: np.uint64, count: np.uint64, at: np.uint64
) -> np.uint64:
    if kind != LIST:
        return refuse(row, BLOCK_HASHES, NO_LIST, _0)
    if count > batch.max_blocks:
        return refuse(row, BLOCK_HASHES, TOO_MANY, _0)
    first = batch.totals[HASH_COUNT]
    for i in range(count):
        element, value, inside = head_at(at, batch.end)
        at, block_hash = _hash_of(element, value, inside)
        if at == _0:
            return refuse(row, BLOCK_HASHES, NO_HASH, i + _1)
        batch.hashes[first + i] = block_hash
    note(row, BLOCK_HASHES, first, count)
    batch.totals[HASH_COUNT] = first + count
    return at


@device
def _read_pairs(batch: Batch, row: Words, count: np.uint64, at: np.uint64) -> np.uint64:
    """Read the tokens a, b, c, d from the pairs [a, b], [b, c], [c, d]."""
    first, tokens = batch.totals[TOKEN_COUNT], batch.tokens
    for i in range(count):
        kind, length, inside = head_at(at, batch.end)
        if kind != LIST or length != _2:
            return refuse(row, TOKEN_IDS, NO_PAIR, i + _1)
        before = tokens[first + i]
        read, at = read_u32s(inside, length, batch.end, tokens, first + i)
        if read < length:
            return refuse(row, TOKEN_IDS, NO_TOKEN, i + _1)
        if i and tokens[first + i] != before:
            return refuse(row, TOKEN_IDS, NO_PAIR, i + _1)
    row[EAGLE] = _1
    note(row, TOKEN_IDS, first, count + _1)
    batch.totals[TOKEN_COUNT] = first + count + _1
    return at


@device
def _read_tokens(
    batch: Batch, row: Words, kind: np.uint64, count: np.uint64, at: np.uint64
) -> np.uint64:
    if kind != LIST:
        return refuse(row, TOKEN_IDS, NO_LIST, _0)
    if count:
        first_kind, _, _ = head_at(at, batch.end)
        if first_kind == LIST:
            return _read_pairs(batch, row, count, at)
    row[EAGLE] = _0
    first = batch.totals[TOKEN_COUNT]
    read, at = read_u32s(at, count, batch.end, batch.tokens, first)
    if read < count:
        return refuse(row, TOKEN_IDS, NO_TOKEN, read + _1)
    note(row, TOKEN_IDS, first, count)
    batch.totals[TOKEN_COUNT] = first + count
    return at


@device
def _read_extra_keys(
    batch: Batch, row: Words, kind: np.uint64, count: np.uint64, inside: np.uint64, at: np.uint64
) -> np.uint64:
    """Read the extra keys of an event's blocks.

    Engines without extra keys send a nil for every block; the field then counts as absent.
    """
    if kind != LIST:
        return refuse(row, EXTRA_KEYS, NO_LIST, _0)
    after = skip(at, batch.end)
    if after == _0:
        return _0
    nils = _0
    while nils < count and u8_at(inside + nils) == _NIL_CODE:
        nils += _1
    if inside + nils < after:
        note(row, EXTRA_KEYS, at - batch.start, after - batch.start)
    return after


@device
def _read_plain(
    batch: Batch, row: Words, field: np.uint64, kind: np.uint64, value: np.uint64, at: np.uint64
) -> np.uint64:
    if field in (BLOCK_SIZE, LORA_ID, GROUP, WINDOW):
        if kind != NATURAL or (value > _U32_MAX and field != LORA_ID):
            return refuse(row, field, NO_NUMBER, _0)
        note(row, field, value, _1)
        return at
    if kind != STRING:
        return refuse(row, field, NO_TEXT, _0)
    note(row, field, at - batch.start, at - batch.start + value)
    return at + value


@device
def read_field(batch: Batch, row: Words, at: np.uint64, field: np.uint64) -> np.uint64:
    """Read a field that is read of this kind into the row.

    Returns its end address, or 0 if it is malformed.
    """
    kind, value, inside = head_at(at, batch.end)
    forget(row, field)
    if kind == NIL:
        return inside
    if field == BLOCK_HASHES:
        return _read_hashes(batch, row, kind, value, inside)
    if field == TOKEN_IDS:
        return _read_tokens(batch, row, kind, value, inside)
    if field == PARENT:
        return _read_parent(row, kind, value, inside)
    if field == EXTRA_KEYS:
        return _read_extra_keys(batch, row, kind, value, inside, at)
    return _read_plain(batch, row, field, kind, value, inside)
