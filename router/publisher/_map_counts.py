"""What becomes of the rows of an engine map: named, counted, buried, forgotten.

A row is *named* if its sequence hash is known, otherwise an orphan. It is *dead* if no tier holds a
copy: a dead orphan is forgotten at once; a dead named row lives on for its children, and without
any lies in the graveyard, a list from the oldest to the newest whose links take the copies' place.

Invariants: `children` counts the rows that have this one as their parent; the state's sums are sums
over the rows; who has copies or children is not in the graveyard, every other named row is.
"""

import numpy as np

from router.compiled import device
from router.publisher._map_rows import (
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
    close_slot,
    slot_of,
)

MAX_COPIES = np.uint64(65_535)

_0 = np.uint64(0)
_1 = np.uint64(1)
_4 = np.uint64(4)
_16 = np.uint64(16)
_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_WIDTH = np.uint64(ROW_WORDS)
_COPIES = np.uint64(COPIES)


@device
def _join(m: EngineRows, older: np.uint64, newer: np.uint64) -> None:
    """Make two rows, counted from 1, neighbours; 0 is the end of the list."""
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
def _let_go(m: EngineRows, parent: np.uint64) -> None:
    """A parent (counted from 1) has a child less; dead without others, it is the next to go."""
    if parent:
        row = (parent - _1) * _WIDTH
        m.rows[row + LINKS] -= _1 << _32
        if m.rows[row + HELD] == _0 and m.rows[row + LINKS] >> _32 == _0:
            _link(m, row, _0, m.state[OLDEST])


@device
def exhume(m: EngineRows, row: np.uint64) -> None:
    """Take a row out of the graveyard."""
    links = m.rows[row + HELD]
    m.rows[row + META] &= ~BURIED
    m.rows[row + HELD] = _0
    _join(m, links & _LOW, links >> _32)


@device
def forget(m: EngineRows, row: np.uint64) -> None:
    """Free a row without copies, and let go of its parent."""
    meta = m.rows[row + META]
    if meta & BURIED:
        exhume(m, row)
    if meta & NAMED:
        m.state[DEAD] -= _1
        m.uses[meta & _LOW] -= np.uint32(1)
        _let_go(m, m.rows[row + LINKS] & _LOW)
    close_slot(m, slot_of(m, m.rows[row + KEY]))
    m.rows[row + META] = _0
    m.rows[row + KEY] = m.state[FREE_ROW]
    m.state[FREE_ROW] = row // _WIDTH + _1
    m.state[COUNT] -= _1


@device
def name(
    m: EngineRows, row: np.uint64, sequence: np.uint64, parent: np.uint64, context: np.uint64
) -> None:
    """Give a row its sequence hash, its parent (a row, or NOWHERE) and its context."""
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
            exhume(m, parent)
        m.rows[parent + LINKS] += _1 << _32


@device
def copies_of(m: EngineRows, row: np.uint64, tier: np.uint64) -> np.uint64:
    """How many copies of a block there are in a tier."""
    if m.rows[row + META] & BURIED:
        return _0
    copies: np.uint64 = (m.rows[row + HELD] >> (_16 * tier)) & MAX_COPIES
    return copies


@device
def mask_of(m: EngineRows, row: np.uint64) -> np.uint64:
    """The tiers that have copies, as bits."""
    mask = _0
    for tier in range(_4):
        mask |= np.uint64(copies_of(m, row, np.uint64(tier)) != _0) << np.uint64(tier)
    return mask


@device
def count_up(m: EngineRows, row: np.uint64, tier: np.uint64, is_full: bool) -> np.uint64:
    """There is a copy more in a tier; with `is_full`, at least one. Returns how many there were."""
    before = copies_of(m, row, tier)
    if is_full and before:
        m.state[UNCOUNTED] += _1
        return before
    if before == MAX_COPIES:
        m.state[SATURATED] += _1
        return before
    if m.rows[row + META] & BURIED:
        exhume(m, row)
    if m.rows[row + HELD] == _0:
        if m.rows[row + META] & NAMED:
            m.state[DEAD] -= _1
        else:
            m.state[ORPHANS] += _1
    m.rows[row + HELD] += _1 << (_16 * tier)
    m.state[_COPIES + tier] += _1
    return before


@device
def bury(m: EngineRows, row: np.uint64) -> None:
    """Put a named row without copies and children at the newest end of the graveyard."""
    if m.rows[row + LINKS] >> _32 == _0 and not m.rows[row + META] & BURIED:
        _link(m, row, m.state[NEWEST], _0)


@device
def count_down(m: EngineRows, row: np.uint64, tier: np.uint64, copies: np.uint64) -> None:
    """So many of the copies in a tier are gone; a dead orphan is gone too."""
    m.rows[row + HELD] -= copies << (_16 * tier)
    m.state[_COPIES + tier] -= copies
    if m.rows[row + HELD] != _0:
        return
    if m.rows[row + META] & NAMED:
        m.state[DEAD] += _1
        bury(m, row)
    else:
        m.state[ORPHANS] -= _1
        forget(m, row)


@device
def forget_oldest(m: EngineRows, most: np.uint64) -> None:
    """Forget rows of the graveyard, oldest first, until at most so many are dead."""
    while m.state[DEAD] > most and m.state[OLDEST]:
        forget(m, (m.state[OLDEST] - _1) * _WIDTH)
