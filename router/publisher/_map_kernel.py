"""The kernels of an engine map: what Python calls. One call does one engine event;
stores are in `_map_store.py`.

`address` is where the state lies (`_map_rows`). `group` is xored into every engine hash, 0 for
group 0. `how` is a sum of the flags below, `tier` among them. What is refused changes nothing.
"""

import numpy as np

from router.compiled import device, kernel
from router.publisher._map_counts import (
    copies_of,
    count_down,
    count_up,
)
from router.publisher._map_naming import has_duplicates
from router.publisher._map_rows import (
    COUNT,
    META,
    MOVES,
    NAMED,
    NOWHERE,
    OVER_REMOVALS,
    ROW_CAPACITY,
    SEQUENCE,
    UNKNOWN_REMOVALS,
    EngineRows,
    Words,
    add,
    fetch,
    find,
    move,
    rows_at,
)
from router.publisher._map_whole import forget_surplus, tell

NO_TIER = 4
"""In place of a tier: the blocks get their names, and are counted nowhere."""

FULL = 8
"""A store says that there is a copy, not that there is one more."""

TIER_BITS = 7
"""Of `how`: the tier."""

# Why an event is refused.
NO_ROOM = -1
DUPLICATE = -2

_0 = np.uint64(0)
_1 = np.uint64(1)
_LOW = np.uint64(0xFFFFFFFF)
_TIER = np.uint64(TIER_BITS)
_FULL = np.uint64(FULL)


@device
def has_room(m: EngineRows, count: int) -> bool:
    """Is there room for so many rows more?"""
    return bool(m.state[COUNT] + np.uint64(count) <= m.state[ROW_CAPACITY])


@kernel("int64(int64, Array(uint64, 1, 'C', readonly=True), uint64, int64, Array(uint64, 1, 'C'))")
def join(address: int, hashes: Words, group: int, how: int, out: Words) -> int:
    """Count blocks without tokens in a tier; those that have no name become orphans, or stay so.

    `out` has four parts: sequence hashes of those that have a name, the sequence hash of each one's
    parent, how each begins (0: its parent is the one before, 1: behind its parent, 2: at the root),
    and those of which the tier had no copy. Returns the lengths of the first part and, above bit
    32, of the last.
    """
    m, blocks, mixed = rows_at(np.uint64(address)), len(hashes), np.uint64(group)
    move(m, MOVES * np.uint64(blocks))
    if not has_room(m, blocks):
        return NO_ROOM
    if has_duplicates(hashes):
        return DUPLICATE
    tier, is_full = np.uint64(how) & _TIER, bool(np.uint64(how) & _FULL)
    named, firsts, last = 0, 0, NOWHERE
    for i in range(blocks):
        fetch(m, hashes, mixed, i)
        row = find(m, hashes[i] ^ mixed)
        if row == NOWHERE:
            row = add(m, hashes[i] ^ mixed)
        had = count_up(m, row, tier, is_full)
        if not m.rows[row + META] & NAMED:
            last = NOWHERE
            continue
        last = tell(m, row, last, out, named, blocks)
        if had == _0:
            out[3 * blocks + firsts] = out[named]
            firsts += 1
        named += 1
    return named | firsts << 32


@kernel("int64(int64, Array(uint64, 1, 'C', readonly=True), uint64, int64, Array(uint64, 1, 'C'))")
def remove(address: int, hashes: Words, group: int, tier: int, out: Words) -> int:
    """One copy of each block is gone from a tier; how many it was the last of, see `out`."""
    m, mixed = rows_at(np.uint64(address)), np.uint64(group)
    last = 0
    for i in range(len(hashes)):
        fetch(m, hashes, mixed, i)
        row = find(m, hashes[i] ^ mixed)
        if row == NOWHERE:
            m.state[UNKNOWN_REMOVALS] += _1
            continue
        copies = copies_of(m, row, np.uint64(tier))
        if copies == _0:
            m.state[OVER_REMOVALS] += _1
            continue
        if copies == _1 and m.rows[row + META] & NAMED:
            out[last] = m.rows[row + SEQUENCE]
            last += 1
        count_down(m, row, np.uint64(tier), _1)
    forget_surplus(m)
    return last


@kernel("int64(int64, uint64)")
def context_of(address: int, key: int) -> int:
    """The context of a named row, or -1."""
    m = rows_at(np.uint64(address))
    row = find(m, np.uint64(key))
    if row == NOWHERE or not m.rows[row + META] & NAMED:
        return -1
    return int(m.rows[row + META] & _LOW)
