"""The kernels of an engine map that Python calls. One call applies one engine event.

Stores are in `_map_store.py`. `address` is the address of the state (`_map_rows`). `group` is XORed
into every engine hash, 0 for group 0. `how` is a sum of the flags below and the tier. A refused
event changes nothing.
"""

import numpy as np

from router.publisher.normalizer._map_counts import (
    copies_of,
    count_down,
    count_up,
    mask_of,
    supersede_row,
)
from router.publisher.normalizer._map_naming import has_duplicates
from router.publisher.normalizer._map_rows import (
    COUNT,
    META,
    NAMED,
    NOWHERE,
    OVER_REMOVALS,
    ROW_CAPACITY,
    SEQUENCE,
    UNKNOWN_REMOVALS,
    EngineRows,
    add,
    fetch,
    find,
    rows_at,
)
from router.publisher.normalizer._map_sweep import forget_surplus, publish
from router.runtime.kernels._growing_table import MOVES, Words, move
from router.runtime.kernels.numba_runtime import device, kernel
from router.sequence.hashing._hash_kernel import chained

NO_TIER = 4
"""The value in place of a tier: the blocks are named and counted in no tier."""

FULL = 8
"""The flag of stores that report the presence of a copy, not one more copy."""

TIER_BITS = 7
"""The bits of `how` that hold the tier."""

# Reasons why an event is refused.
NO_ROOM = -1
DUPLICATE = -2

_0 = np.uint64(0)
_1 = np.uint64(1)
_LOW = np.uint64(0xFFFFFFFF)
_TIER = np.uint64(TIER_BITS)
_FULL = np.uint64(FULL)


@device
def has_room(m: EngineRows, count: int) -> bool:
    """Return whether there is room for `count` more rows."""
    return bool(m.state[COUNT] + np.uint64(count) <= m.state[ROW_CAPACITY])


@kernel("int64(int64, Array(uint64, 1, 'C', readonly=True), uint64, int64, Array(uint64, 1, 'C'))")
def join(address: int, hashes: Words, group: int, how: int, out: Words) -> int:
    """Count blocks without tokens in a tier; unnamed blocks become, or remain, orphans.

    `out` has four parts: sequence hashes of the named blocks, the sequence hash of each one's
    parent, where each continues (0: its parent is the previous one, 1: after its parent, 2: at the
    root), and the sequence hashes of those without a copy in the tier before. Returns the length of
    the first part and, above bit 32, of the last.
    """
    m, blocks, mixed = rows_at(np.uint64(address)), len(hashes), np.uint64(group)
    move(m.slots, MOVES * np.uint64(blocks))
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
        last = publish(m, row, last, out, named, blocks)
        if had == _0:
            out[3 * blocks + firsts] = out[named]
            firsts += 1
        named += 1
    return named | firsts << 32


@kernel("int64(int64, Array(uint64, 1, 'C', readonly=True), uint64, int64, Array(uint64, 1, 'C'))")
def remove(address: int, hashes: Words, group: int, tier: int, out: Words) -> int:
    """Remove one copy of each block from a tier.

    Named blocks of which it was the last copy are written to `out`. Returns their number.
    """
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


@kernel(
    "int64(int64, Array(uint64, 1, 'C', readonly=True), Array(uint64, 1, 'C', readonly=True),"
    " Array(uint64, 1, 'C', readonly=True), uint64, Array(uint64, 2, 'C'))"
)
def supersede(
    address: int, hashes: Words, local_hashes: Words, head: Words, group: int, out: Words
) -> int:
    """Forget the named blocks that have another sequence hash than an event gives them.

    `head` is the event's, whose parent is named. `out` has two parts: the former sequence hashes,
    and for each a mask of the tiers that held copies. Returns their length.
    """
    m, mixed = rows_at(np.uint64(address)), np.uint64(group)
    is_root, before, gone = head[2] == _0, _0, 0
    if not is_root:
        before = m.rows[find(m, head[1] ^ mixed) + SEQUENCE]
    for i in range(len(hashes)):
        is_first = is_root and i == 0
        before = local_hashes[i] if is_first else chained(before, local_hashes[i])
        row = find(m, hashes[i] ^ mixed)
        if row != NOWHERE and m.rows[row + META] & NAMED and m.rows[row + SEQUENCE] != before:
            out[0, gone], out[1, gone] = m.rows[row + SEQUENCE], mask_of(m, row)
            supersede_row(m, row)
            gone += 1
    return gone


@kernel("int64(int64, uint64)")
def context_of(address: int, key: int) -> int:
    """Return the context of a named row, or -1 if there is none."""
    m = rows_at(np.uint64(address))
    row = find(m, np.uint64(key))
    if row == NOWHERE or not m.rows[row + META] & NAMED:
        return -1
    return int(m.rows[row + META] & _LOW)


@kernel("void(int64, Array(uint64, 1, 'C', readonly=True), uint64, Array(uint64, 2, 'C'))")
def look(address: int, hashes: Words, group: int, out: Words) -> None:
    """Write for each block its sequence hash, whether it has one, and its copies on the device.

    `out` has these three rows. Nothing changes.
    """
    m, mixed = rows_at(np.uint64(address)), np.uint64(group)
    for i in range(len(hashes)):
        row = find(m, hashes[i] ^ mixed)
        out[0, i] = out[1, i] = out[2, i] = _0
        if row != NOWHERE and m.rows[row + META] & NAMED:
            out[0, i], out[1, i] = m.rows[row + SEQUENCE], _1
            out[2, i] = copies_of(m, row, _0)
