"""Kernels that scan a whole engine map; Python calls them rarely.

`address` is the address of the state (`_map_rows`).
"""

import numpy as np

from router.publisher.normalizer._map_counts import copies_of, count_down, forget_oldest
from router.publisher.normalizer._map_rows import (
    COPIES,
    IN_USE,
    LINKS,
    META,
    NAMED,
    NOWHERE,
    POOL_BLOCKS,
    POOL_IS_KNOWN,
    ROW_WORDS,
    SEQUENCE,
    USED_ROWS,
    EngineRows,
    lay,
    rows_at,
    slot_of,
)
from router.runtime.kernels._growing_table import Words, begin_to_move
from router.runtime.kernels.numba_runtime import device, kernel

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_LOW = np.uint64(0xFFFFFFFF)
_WIDTH = np.uint64(ROW_WORDS)


@device
def publish(
    m: EngineRows, row: np.uint64, last: np.uint64, out: Words, index: int, length: int
) -> np.uint64:
    """Write a named row, its parent, and whether its parent is the last row written.

    Returns the row.
    """
    parent = m.rows[row + LINKS] & _LOW
    out[index] = m.rows[row + SEQUENCE]
    out[length + index] = m.rows[(parent - _1) * _WIDTH + SEQUENCE] if parent else _0
    is_next = parent and last == (parent - _1) * _WIDTH
    out[2 * length + index] = _0 if is_next else (_1 if parent else _2)
    return row


@device
def forget_surplus(m: EngineRows) -> None:
    """Forget the oldest retired rows beyond twice the size of the device's pool.

    If the size of the pool is not known, it is taken to be the most copies the device has held.
    """
    if not m.state[POOL_IS_KNOWN]:
        m.state[POOL_BLOCKS] = max(m.state[POOL_BLOCKS], m.state[COPIES])
    forget_oldest(m, _2 * m.state[POOL_BLOCKS])


@kernel("int64(int64, int64, int64, int64)")
def clear(address: int, tier: int, first: int, most: int) -> int:
    """Remove all copies in a tier from `most` rows, from row `first` on. O(`most`).

    Returns the first row not yet visited, or 0 if all rows are done.
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
    """Put every row into the slots, which must be empty. O(rows)."""
    m = rows_at(np.uint64(address))
    for i in range(m.state[USED_ROWS]):
        row = np.uint64(i) * _WIDTH
        if m.rows[row + META] & IN_USE:
            lay(m, slot_of(m, m.rows[row]), row)


@kernel("void(int64)")
def grow(address: int) -> None:
    """Finish the current move, then make the present slots the former ones."""
    begin_to_move(rows_at(np.uint64(address)).slots)


@kernel("void(int64, int64)")
def forget_dead(address: int, most: int) -> None:
    """Forget the oldest retired rows, until at most `most` rows are dead."""
    forget_oldest(rows_at(np.uint64(address)), np.uint64(most))


@device
def _is_published(m: EngineRows, row: np.uint64, tier: int) -> bool:
    if not m.rows[row + META] & NAMED or not m.rows[row + META] & IN_USE:
        return False
    return bool(copies_of(m, row, np.uint64(tier)) != _0)


@kernel("int64(int64, int64, Array(uint64, 1, 'C'))")
def paths(address: int, tier: int, out: Words) -> int:
    """Write all named blocks of a tier, each after its parent where one chain contains both.

    O(rows). `out` has three parts, like the first three of `_map_kernel.join`. Returns their
    length.
    """
    m = rows_at(np.uint64(address))
    used, length = np.int64(m.state[USED_ROWS]), len(out) // 3
    heir = np.zeros(used + 1, np.uint32)  # Each row's child that follows it; rows from 1.
    for i in range(used):
        row = np.uint64(i) * _WIDTH
        if _is_published(m, row, tier):
            heir[m.rows[row + LINKS] & _LOW] = np.uint32(i + 1)
    heir[0] = np.uint32(0)
    told = 0
    for i in range(used):
        row = np.uint64(i) * _WIDTH
        parent = m.rows[row + LINKS] & _LOW
        follows = heir[parent] == np.uint32(i + 1)
        if not _is_published(m, row, tier) or (
            follows and _is_published(m, (parent - _1) * _WIDTH, tier)
        ):
            continue
        last, this = NOWHERE, np.uint64(i + 1)
        while this and _is_published(m, (this - _1) * _WIDTH, tier):
            last = publish(m, (this - _1) * _WIDTH, last, out, told, length)
            told += 1
            this = np.uint64(heir[this])
    return told
