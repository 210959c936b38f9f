"""The life of an engine map's rows: named, counted, retired, forgotten.

A row is *named* if its sequence hash is known, otherwise it is an orphan. It is *dead* if no tier
holds a copy. A dead orphan is forgotten at once. A dead named row is kept while it has children;
without children it is retired (`BURIED`): it enters a list from the oldest to the newest, the links
of which take the place of the copies.

Invariants: `children` counts the rows that have this one as their parent; the state's sums are sums
over the rows; rows with copies or children are not retired, every other named row is.
"""

import numpy as np

from router.publisher.normalizer._map_rows import (
    BURIED,
    COPIES,
    COUNT,
    DEAD,
    FREE_ROW,
    HELD,
    KEY,
    LINKS,
    META,
    NAMED,
    NEWEST,
    NOWHERE,
    OLDEST,
    ORPHANS,
    ROW_WORDS,
    SATURATED,
    SEQUENCE,
    UNCOUNTED,
    EngineRows,
    find,
    lay,
    slot_of,
)
from router.runtime.kernels._growing_table import close
from router.runtime.kernels.numba_runtime import device

MAX_COPIES = np.uint64(65_535)

_0 = np.uint64(0)
_1 = np.uint64(1)
_4 = np.uint64(4)
_16 = np.uint64(16)
_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_SPARE_KEYS = np.uint64(0xA24BAED4963EE407)
_WIDTH = np.uint64(ROW_WORDS)
_COPIES = np.uint64(COPIES)


@device
def _join(m: EngineRows, older: np.uint64, newer: np.uint64) -> None:
    """Make two rows, counted from 1, neighbours in the list; 0 is the end of the list."""
    if older:
        place = (older - _1) * _WIDTH + HELD
        m.rows[place] = (m.rows[place] & _LOW) | newer << _32
    else:
        m.state[OLDEST] = newer
    if newer:
        place = (newer - _1) * _WIDTH + HELD
        m.rows[place] = (m.rows[place] & ~_LOW) | older
    else:
        m.state[NEWEST] = older


@device
def _link(m: EngineRows, row: np.uint64, older: np.uint64, newer: np.uint64) -> None:
    this = row // _WIDTH + _1
    m.rows[row + META] |= BURIED
    m.rows[row + HELD] = older | newer << _32
    _join(m, older, this)
    _join(m, this, newer)


@device
def _release(m: EngineRows, parent: np.uint64) -> None:
    """Remove a child from a parent (counted from 1; 0: no parent).

    A dead parent without other children is retired as the oldest row, to be forgotten next.
    """
    if parent:
        row = (parent - _1) * _WIDTH
        m.rows[row + LINKS] -= _1 << _32
        if m.rows[row + HELD] == _0 and m.rows[row + LINKS] >> _32 == _0:
            _link(m, row, _0, m.state[OLDEST])


@device
def restore_row(m: EngineRows, row: np.uint64) -> None:
    """Remove a row from the list of retired rows."""
    links = m.rows[row + HELD]
    m.rows[row + META] &= ~BURIED
    m.rows[row + HELD] = _0
    _join(m, links & _LOW, links >> _32)


@device
def forget(m: EngineRows, row: np.uint64) -> None:
    """Free a row without copies, and remove it from its parent's children."""
    meta = m.rows[row + META]
    if meta & BURIED:
        restore_row(m, row)
    if meta & NAMED:
        m.state[DEAD] -= _1
        m.uses[meta & _LOW] -= np.uint32(1)
        _release(m, m.rows[row + LINKS] & _LOW)
    close(m.slots, slot_of(m, m.rows[row + KEY]))
    m.rows[row + META] = _0
    m.rows[row + KEY] = m.state[FREE_ROW]
    m.state[FREE_ROW] = row // _WIDTH + _1
    m.state[COUNT] -= _1


@device
def name(
    m: EngineRows, row: np.uint64, sequence: np.uint64, parent: np.uint64, context: np.uint64
) -> None:
    """Set a row's sequence hash, its parent (a row, or NOWHERE) and its context."""
    if m.rows[row + HELD]:
        m.state[ORPHANS] -= _1
    else:
        m.state[DEAD] += _1
    m.rows[row + SEQUENCE] = sequence
    m.rows[row + META] |= NAMED | context
    m.uses[context] += np.uint32(1)
    if parent != NOWHERE:
        m.rows[row + LINKS] |= parent // _WIDTH + _1
        if m.rows[parent + META] & BURIED:
            restore_row(m, parent)
        m.rows[parent + LINKS] += _1 << _32


@device
def copies_of(m: EngineRows, row: np.uint64, tier: np.uint64) -> np.uint64:
    """Return the number of copies of a block in a tier."""
    if m.rows[row + META] & BURIED:
        return _0
    copies: np.uint64 = (m.rows[row + HELD] >> (_16 * tier)) & MAX_COPIES
    return copies


@device
def mask_of(m: EngineRows, row: np.uint64) -> np.uint64:
    """Return a bit mask of the tiers that have copies."""
    mask = _0
    for tier in range(_4):
        mask |= np.uint64(copies_of(m, row, np.uint64(tier)) != _0) << np.uint64(tier)
    return mask


@device
def count_up(m: EngineRows, row: np.uint64, tier: np.uint64, is_full: bool) -> np.uint64:
    """Count one more copy in a tier, or at least one with `is_full`. Returns the former count."""
    before = copies_of(m, row, tier)
    if is_full and before:
        m.state[UNCOUNTED] += _1
        return before
    if before == MAX_COPIES:
        m.state[SATURATED] += _1
        return before
    if m.rows[row + META] & BURIED:
        restore_row(m, row)
    if m.rows[row + HELD] == _0:
        if m.rows[row + META] & NAMED:
            m.state[DEAD] -= _1
        else:
            m.state[ORPHANS] += _1
    m.rows[row + HELD] += _1 << (_16 * tier)
    m.state[_COPIES + tier] += _1
    return before


@device
def retire_row(m: EngineRows, row: np.uint64) -> None:
    """Retire a named row without copies and children, as the newest one."""
    if m.rows[row + LINKS] >> _32 == _0 and not m.rows[row + META] & BURIED:
        _link(m, row, m.state[NEWEST], _0)


@device
def count_down(m: EngineRows, row: np.uint64, tier: np.uint64, copies: np.uint64) -> None:
    """Subtract `copies` copies in a tier; forget the row if it is now a dead orphan."""
    m.rows[row + HELD] -= copies << (_16 * tier)
    m.state[_COPIES + tier] -= copies
    if m.rows[row + HELD] != _0:
        return
    if m.rows[row + META] & NAMED:
        m.state[DEAD] += _1
        retire_row(m, row)
    else:
        m.state[ORPHANS] -= _1
        forget(m, row)


@device
def supersede_row(m: EngineRows, row: np.uint64) -> None:
    """Remove a named row's copies and its key, so that its hash can name another block.

    A row with children stays until they are gone, under a key of its own.
    """
    for tier in range(4):
        copies = copies_of(m, row, np.uint64(tier))
        if copies:
            count_down(m, row, np.uint64(tier), copies)
    if m.rows[row + META] & BURIED:
        forget(m, row)
        return
    close(m.slots, slot_of(m, m.rows[row + KEY]))
    key = (row + _1) * _SPARE_KEYS
    while find(m, key) != NOWHERE:
        key += _1
    m.rows[row + KEY] = key
    lay(m, slot_of(m, key), row)


@device
def forget_oldest(m: EngineRows, most: np.uint64) -> None:
    """Forget retired rows, oldest first, until at most `most` rows are dead."""
    while m.state[DEAD] > most and m.state[OLDEST]:
        forget(m, (m.state[OLDEST] - _1) * _WIDTH)
