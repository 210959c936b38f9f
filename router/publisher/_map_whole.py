"""Kernels that go through a whole engine map: what Python calls, rarely.

`address` is where the state lies (`_map_rows`).
"""

import numpy as np

from router.compiled import device, kernel
from router.publisher._map_counts import copies_of, count_down, forget_oldest
from router.publisher._map_rows import (
    ALL,
    COPIES,
    FORMER_BITS,
    FORMER_SLOTS,
    IN_USE,
    LINKS,
    META,
    MOVED,
    NAMED,
    NOWHERE,
    POOL_BLOCKS,
    POOL_IS_KNOWN,
    ROW_WORDS,
    SEQUENCE,
    SLOT_BITS,
    SLOTS,
    START,
    USED_ROWS,
    EngineRows,
    Words,
    lay,
    move,
    rows_at,
    slot_of,
)

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_LOW = np.uint64(0xFFFFFFFF)
_WIDTH = np.uint64(ROW_WORDS)


@device
def tell(
    m: EngineRows, row: np.uint64, last: np.uint64, out: Words, index: int, length: int
) -> np.uint64:
    """Write a named row, its parent, and whether that is the row told last; returns the row."""
    parent = m.rows[row + LINKS] & _LOW
    out[index] = m.rows[row + SEQUENCE]
    out[length + index] = m.rows[(parent - _1) * _WIDTH + SEQUENCE] if parent else _0
    is_next = parent and last == (parent - _1) * _WIDTH
    out[2 * length + index] = _0 if is_next else (_1 if parent else _2)
    return row


@device
def forget_surplus(m: EngineRows) -> None:
    """Keep twice as many dead rows as the device has had copies, or can have."""
    if not m.state[POOL_IS_KNOWN]:
        m.state[POOL_BLOCKS] = max(m.state[POOL_BLOCKS], m.state[COPIES])
    forget_oldest(m, _2 * m.state[POOL_BLOCKS])


@kernel("int64(int64, int64, int64, int64)")
def clear(address: int, tier: int, first: int, most: int) -> int:
    """All copies of so many rows, from one on, are gone from a tier; the first one not looked at,
    or 0 if there is none. O(those).
    """
    m = rows_at(np.uint64(address))
    used, i = np.int64(m.state[USED_ROWS]), first
    while i < used and i < first + most:
        row = np.uint64(i) * _WIDTH
        if m.rows[row + META] & IN_USE:
            copies = copies_of(m, row, np.uint64(tier))
            if copies:
                count_down(m, row, np.uint64(tier), copies)
        i += 1
    if i < used:
        return i
    forget_surplus(m)
    return 0


@kernel("void(int64)")
def lay_all(address: int) -> None:
    """Put every row into the slots, which are empty. O(rows)."""
    m = rows_at(np.uint64(address))
    for i in range(m.state[USED_ROWS]):
        row = np.uint64(i) * _WIDTH
        if m.rows[row + META] & IN_USE:
            lay(m, slot_of(m, m.rows[row]), row)


@kernel("void(int64)")
def begin_to_move(address: int) -> None:
    """All slots are in place; from now on they are the former ones."""
    m = rows_at(np.uint64(address))
    move(m, ALL >> _1)
    m.state[FORMER_SLOTS], m.state[FORMER_BITS] = m.state[SLOTS], m.state[SLOT_BITS]
    start = _0
    while m.slots[start] != _0:
        start += _1
    m.state[START], m.state[MOVED] = (start + _1) & ((_1 << m.state[SLOT_BITS]) - _1), _0


@kernel("void(int64, int64)")
def forget_dead(address: int, most: int) -> None:
    """Forget the graveyard's oldest rows, until at most so many are dead."""
    forget_oldest(rows_at(np.uint64(address)), np.uint64(most))


@device
def _is_told(m: EngineRows, row: np.uint64, tier: int) -> bool:
    if not m.rows[row + META] & NAMED or not m.rows[row + META] & IN_USE:
        return False
    return bool(copies_of(m, row, np.uint64(tier)) != _0)


@kernel("int64(int64, int64, Array(uint64, 1, 'C'))")
def paths(address: int, tier: int, out: Words) -> int:
    """All named blocks of a tier, each behind its parent where that comes with it. O(rows).

    `out` has three parts, as the first ones of `_map_kernel.join`; returns their length.
    """
    m = rows_at(np.uint64(address))
    used, length = np.int64(m.state[USED_ROWS]), len(out) // 3
    heir = np.zeros(used + 1, np.uint32)  # of each row, the child that follows it; rows from 1
    for i in range(used):
        row = np.uint64(i) * _WIDTH
        if _is_told(m, row, tier):
            heir[m.rows[row + LINKS] & _LOW] = np.uint32(i + 1)
    heir[0] = np.uint32(0)
    told = 0
    for i in range(used):
        row = np.uint64(i) * _WIDTH
        parent = m.rows[row + LINKS] & _LOW
        follows = heir[parent] == np.uint32(i + 1)
        if not _is_told(m, row, tier) or (follows and _is_told(m, (parent - _1) * _WIDTH, tier)):
            continue
        last, this = NOWHERE, np.uint64(i + 1)
        while this and _is_told(m, (this - _1) * _WIDTH, tier):
            last = tell(m, (this - _1) * _WIDTH, last, out, told, length)
            told += 1
            this = np.uint64(heir[this])
    return told
