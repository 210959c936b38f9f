"""The kernel that names and counts stored blocks; `engine_map.py` calls it most often.

One call applies consecutive events that differ only in their blocks and parents, up to the first
refused one. `_map_kernel` describes `address`, `group` and `how`.
"""

from typing import NamedTuple

import numpy as np

from router.publisher.normalizer._map_counts import count_up, mask_of, name, retire_row
from router.publisher.normalizer._map_kernel import (
    DUPLICATE,
    FULL,
    NO_ROOM,
    NO_TIER,
    TIER_BITS,
    has_room,
)
from router.publisher.normalizer._map_naming import has_duplicates, resolve
from router.publisher.normalizer._map_rows import (
    HELD,
    META,
    NAMED,
    NOWHERE,
    SEQUENCE,
    EngineRows,
    Halves,
    add,
    find,
    rows_at,
)
from router.publisher.normalizer._map_sweep import forget_surplus
from router.runtime.kernels._growing_table import MOVES, Words, move
from router.runtime.kernels.numba_runtime import device, kernel, words_at
from router.sequence.hashing._hash_kernel import hash_windows

HASHED = 16
"""The flag of `how` for events with local hashes in place of tokens."""

INHERITED = -1
"""The value in place of a context: the parent's context."""

UNKNOWN_PARENT = -3
CONFLICT = -4
"""Reasons why an event is refused, in addition to those of `_map_kernel`."""

DONE, FIRSTS, MASKS = range(3)
"""The totals of `store`: events done, blocks new to the tier, masks that are not 0."""
TOLD_WORDS = 3

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)
_8 = np.uint64(8)
_LOW = np.uint64(0xFFFFFFFF)
_TIER = np.uint64(TIER_BITS)
_NO_TIER = np.uint64(NO_TIER)
_FULL = np.uint64(FULL)
_HASHED = np.uint64(HASHED)


class _Windows(NamedTuple):
    """The tokens that a block's local hash covers: `length` bytes at every `stride` bytes."""

    stride: np.uint64
    length: np.uint64


class _Event(NamedTuple):
    """One event: its blocks, parent and tokens, and its share of the arrays that `store` writes.

    The arrays are views that own no memory: Numba would count references of owning arrays at every
    call.
    """

    hashes: Words
    parent: np.uint64
    has_parent: bool
    tokens: np.uint64
    names: Words
    masks: Words
    found: Words


@device
def _event_at(
    hashes: Words, tokens: np.uint64, paths: Words, place: np.uint64, w: _Windows, out: Words
) -> _Event:
    blocks, path = np.uint64(len(hashes)), _3 * place
    first, is_last = paths[path], path + _3 == np.uint64(len(paths))
    length = (blocks if is_last else paths[path + _3]) - first
    share = np.uint64(out.ctypes.data) + _8 * first
    return _Event(
        words_at(np.uint64(hashes.ctypes.data) + _8 * first, length),
        paths[path + _1],
        bool(paths[path + _2] != _0),
        tokens + first * w.stride + place * (w.length - w.stride),
        words_at(share, length),
        words_at(share + _8 * _2 * blocks, length),
        words_at(share + _8 * _3 * blocks, length),
    )


@device
def _is_among(hashes: Words, one: np.uint64) -> bool:
    is_among = False
    for i in range(len(hashes)):
        is_among |= bool(hashes[i] == one)
    return is_among


@device
def _refusal(m: EngineRows, event: _Event, group: np.uint64) -> int:
    """Return the reason why an event's blocks cannot be stored, or 0 if they can."""
    if not has_room(m, len(event.hashes)):
        return NO_ROOM
    if has_duplicates(event.hashes):
        return DUPLICATE
    if event.has_parent:
        if _is_among(event.hashes, event.parent):
            return DUPLICATE
        parent = find(m, event.parent ^ group)
        if parent == NOWHERE or not m.rows[parent + META] & NAMED:
            return UNKNOWN_PARENT
    return 0


@device
def _take(
    m: EngineRows,
    event: _Event,
    group: np.uint64,
    parent: np.uint64,
    context: np.uint64,
    flags: np.uint64,
    firsts: Words,
    told: Words,
) -> None:
    """Name and count blocks that are resolved; `store` describes the output."""
    tier, is_full = flags & _TIER, bool(flags & _FULL)
    for i in range(len(event.hashes)):
        row, mask = event.found[i], _0
        if row == NOWHERE:
            row = event.found[i] = add(m, event.hashes[i] ^ group)
        is_unnamed = not m.rows[row + META] & NAMED
        if is_unnamed:
            mask = mask_of(m, row)
            name(m, row, event.names[i], parent, context)
        if tier < _NO_TIER:
            if count_up(m, row, tier, is_full) == _0 or is_unnamed:
                firsts[told[FIRSTS]] = event.names[i]
                told[FIRSTS] += _1
            mask &= ~(_1 << tier)
        event.masks[i] = mask
        told[MASKS] += np.uint64(mask != _0)
        parent = row


@device
def _retire_dead(m: EngineRows, rows: Words) -> None:
    for i in range(len(rows)):
        if m.rows[rows[i] + HELD] == _0:
            retire_row(m, rows[i])


@device
def _store(
    m: EngineRows,
    event: _Event,
    windows: _Windows,
    group: np.uint64,
    context: int,
    flags: np.uint64,
    firsts: Words,
    told: Words,
) -> int:
    """Name and count the blocks of one event. Returns 0, or the reason for its refusal."""
    refusal = _refusal(m, event, group)
    if refusal:
        return refusal
    parent, kind = NOWHERE, np.uint64(max(context, 0))
    if event.has_parent:
        parent = find(m, event.parent ^ group)
        if context == INHERITED:
            kind = m.rows[parent + META] & _LOW
    if not flags & _HASHED:
        hash_windows(event.tokens, windows.stride, windows.length, m.seeds[kind], event.names)
    if not resolve(m, event.hashes, group, parent, kind, event.names, event.found):
        return CONFLICT
    _take(m, event, group, parent, kind, flags, firsts, told)
    if flags & _TIER == _NO_TIER:
        _retire_dead(m, event.found)
    forget_surplus(m)
    return 0


@kernel(
    "int64(int64, Array(uint64, 1, 'C', readonly=True),"
    " Array(uint32, 1, 'C', readonly=True, aligned=False), Array(uint64, 1, 'C'),"
    " int64, int64, uint64, int64, int64, Array(uint64, 1, 'C'))"
)
def store(
    address: int,
    hashes: Words,
    tokens: Halves,
    paths: Words,
    block_size: int,
    window: int,
    group: int,
    context: int,
    how: int,
    out: Words,
) -> int:
    """Name blocks by their tokens, and count them in a tier.

    `paths` has three words for each event: the index of its first block, its parent, and 1 if it
    has one. Parents are replaced by their sequence hashes. The tokens of the events lie one after
    the other, as many as their windows cover.

    `out` has four parts: sequence hashes; the sequence hashes of blocks that the tier had no copy
    of; for each block a mask of the other tiers that held copies while it was an orphan; and
    working memory. The totals follow. Returns 0, or the reason why the event after those done is
    refused.
    """
    m, mixed, start = rows_at(np.uint64(address)), np.uint64(group), np.uint64(tokens.ctypes.data)
    windows = _Windows(_4 * np.uint64(block_size), _4 * np.uint64(window))
    part, behind = np.uint64(out.ctypes.data), _8 * np.uint64(len(hashes))
    firsts = words_at(part + behind, np.uint64(len(hashes)))
    told = words_at(part + _4 * behind, np.uint64(TOLD_WORDS))
    told[:] = _0
    move(m.slots, MOVES * np.uint64(len(hashes)))
    for number in range(len(paths) // 3):
        place = np.uint64(number)
        event = _event_at(hashes, start, paths, place, windows, out)
        refusal = _store(m, event, windows, mixed, context, np.uint64(how), firsts, told)
        if refusal:
            return refusal
        if event.has_parent:
            parent = find(m, event.parent ^ mixed)
            paths[_3 * place + _1] = m.rows[parent + SEQUENCE]
        told[DONE] += _1
    return 0
