"""The rows of one rank's engine map, and how they are found.

    engine hash × multiplier = │ spread, 32 bits │ …        slot (8 bytes)   spread │ row + 1
                                  │ its top: home                              0: a gap
                                    ▼
    row (40 bytes)   key │ sequence hash │ parent, children │ copies per tier │ context, flags

Rows and slots are counted from 0 here, but from 1 where they are kept, so that 0 is none. A row is
handed around as the index of its first word.

Slots grow as those of `_held_table` do: twice as many stand beside the former ones, from which some
move with every block that is stored, up to a gap, in the order of homes. A position says by
`FORMER` which of them it is in. A slot has all of the spread, so that slots are moved and pulled
back without a look at their rows, each of which would have to be fetched from memory.

Invariants: a search from the home slot on may stop at the first gap; at most 3/4 of the slots are
used; a key is among the former slots until its home there has moved.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.compiled import device, halves_at, prefetch, words_at

Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.uint32]

# Words of the state: where the arrays lie, and how large they are.
ROWS = 0
ROW_CAPACITY = 1
SLOTS = 2
SLOT_BITS = 3
SEEDS = 4
USES = 5
CONTEXTS = 6
FORMER_SLOTS = 7
FORMER_BITS = 8
MOVED = 9  # how many of the former slots, from START on; ALL: there are none
START = 10
# Rows in use and free, and the graveyard; rows are counted from 1, 0 is none.
USED_ROWS = 11
FREE_ROW = 12
OLDEST = 13
NEWEST = 14
POOL_BLOCKS = 15
POOL_IS_KNOWN = 16
# Sums.
COUNT = 17
DEAD = 18
ORPHANS = 19
COPIES = 20  # one word per tier
# What happened so far.
UNKNOWN_REMOVALS = 24
OVER_REMOVALS = 25
SATURATED = 26
UNCOUNTED = 27
STATE_WORDS = 28

ROW_WORDS = 5
# Words of a row.
KEY = np.uint64(0)
SEQUENCE = np.uint64(1)
LINKS = np.uint64(2)
HELD = np.uint64(3)
META = np.uint64(4)
# Flags of a row, above its context.
IN_USE = np.uint64(1 << 32)
NAMED = np.uint64(1 << 33)
BURIED = np.uint64(1 << 34)

NOWHERE = np.uint64(2**64 - 1)
"""Of a search: not there."""

ALL = np.uint64(2**64 - 1)
FORMER = np.uint64(1 << 40)

MOVES = np.uint64(8)
"""Slots moved for each block told."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_8 = np.uint64(8)
_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_WIDTH = np.uint64(ROW_WORDS)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_AHEAD = 16


class EngineRows(NamedTuple):
    """A map as kernels see it; `uses` counts named rows per context."""

    state: Words
    rows: Words
    slots: Words
    former: Words
    seeds: Words
    uses: Halves


@device
def rows_at(address: np.uint64) -> EngineRows:
    """The map that the state at an address describes."""
    state = words_at(address, np.uint64(STATE_WORDS))
    return EngineRows(
        state,
        words_at(state[ROWS], state[ROW_CAPACITY] * _WIDTH),
        words_at(state[SLOTS], _1 << state[SLOT_BITS]),
        words_at(state[FORMER_SLOTS], _1 << state[FORMER_BITS]),
        words_at(state[SEEDS], state[CONTEXTS]),
        halves_at(state[USES], state[CONTEXTS]),
    )


@device
def _spread(key: np.uint64) -> np.uint64:
    """32 bits of a key, the first of which are its home."""
    spread: np.uint64 = (key * _MULTIPLIER) >> _32
    return spread


def home_of(key: int, bits: int) -> int:
    """The home slot of a key among 2^bits."""
    return (key * int(_MULTIPLIER) & (1 << 64) - 1) >> (64 - bits)


@device
def _home(m: EngineRows, spread: np.uint64) -> np.uint64:
    """Where the search for a key, spread, begins."""
    home: np.uint64
    if m.state[MOVED] != ALL:
        home = spread >> (_32 - m.state[FORMER_BITS])
        if (home - m.state[START]) & _last(m, FORMER) >= m.state[MOVED]:
            return FORMER | home
    home = spread >> (_32 - m.state[SLOT_BITS])
    return home


@device
def _last(m: EngineRows, position: np.uint64) -> np.uint64:
    """The last position of the slots that this one is in."""
    last: np.uint64 = (_1 << m.state[FORMER_BITS if position & FORMER else SLOT_BITS]) - _1
    return last


@device
def _next(position: np.uint64, last: np.uint64) -> np.uint64:
    return (position & FORMER) | ((position + _1) & last)


@device
def _slot(m: EngineRows, position: np.uint64) -> np.uint64:
    slot: np.uint64 = m.former[position ^ FORMER] if position & FORMER else m.slots[position]
    return slot


@device
def _set_slot(m: EngineRows, position: np.uint64, slot: np.uint64) -> None:
    if position & FORMER:
        m.former[position ^ FORMER] = slot
    else:
        m.slots[position] = slot


@device
def slot_of(m: EngineRows, key: np.uint64) -> np.uint64:
    """The position of a key, or of the gap it would be put into."""
    spread = _spread(key)
    position = _home(m, spread)
    if position & FORMER:
        return FORMER | _search(m, m.former, position ^ FORMER, _last(m, FORMER), key)
    return _search(m, m.slots, position, _last(m, _0), key)


@device
def _search(
    m: EngineRows, slots: Words, position: np.uint64, last: np.uint64, key: np.uint64
) -> np.uint64:
    spread = _spread(key)
    while True:
        slot = slots[position]
        if slot == _0:
            return position
        if slot >> _32 == spread and m.rows[_row_of(slot) + KEY] == key:
            return position
        position = (position + _1) & last


@device
def row_in(m: EngineRows, position: np.uint64) -> np.uint64:
    """Where the row in a slot begins; NOWHERE in a gap."""
    return _row_of(_slot(m, position))


@device
def _row_of(slot: np.uint64) -> np.uint64:
    if slot == _0:
        return NOWHERE
    row: np.uint64 = ((slot & _LOW) - _1) * _WIDTH
    return row


@device
def find(m: EngineRows, key: np.uint64) -> np.uint64:
    """Where the row of a key begins, or NOWHERE."""
    return row_in(m, slot_of(m, key))


@device
def fetch(m: EngineRows, hashes: Words, group: np.uint64, i: int) -> None:
    """Start to fetch what the searches for the next keys need, for a pass from i = 0 on."""
    first = i if i else -_AHEAD
    for n in range(first + _AHEAD, min(i + _AHEAD + 1, len(hashes))):
        home = _home(m, _spread(hashes[n] ^ group))
        start = m.state[FORMER_SLOTS] if home & FORMER else m.state[SLOTS]
        prefetch(start + (home & ~FORMER) * _8)
    n = i + _AHEAD // 2
    if n < len(hashes):
        _fetch_row(m, _home(m, _spread(hashes[n] ^ group)))


@device
def _fetch_row(m: EngineRows, position: np.uint64) -> None:
    row = row_in(m, position)
    if row != NOWHERE:
        prefetch(m.state[ROWS] + row * _8)


@device
def lay(m: EngineRows, position: np.uint64, row: np.uint64) -> None:
    """Put a row that lies nowhere yet into a gap."""
    _set_slot(m, position, _spread(m.rows[row + KEY]) << _32 | (row // _WIDTH + _1))


@device
def add(m: EngineRows, key: np.uint64) -> np.uint64:
    """A new row without a name or copies, for a key that has none. There has to be room."""
    free = m.state[FREE_ROW]
    row: np.uint64
    if free:
        row = (free - _1) * _WIDTH
        m.state[FREE_ROW] = m.rows[row + KEY]
    else:
        row = m.state[USED_ROWS] * _WIDTH
        m.state[USED_ROWS] += _1
    m.rows[row + KEY] = key
    m.rows[row + SEQUENCE] = m.rows[row + LINKS] = m.rows[row + HELD] = _0
    m.rows[row + META] = IN_USE
    lay(m, slot_of(m, key), row)
    m.state[COUNT] += _1
    return row


@device
def close_slot(m: EngineRows, position: np.uint64) -> None:
    """Empty a slot, and pull back those behind it that are not at home."""
    last = _last(m, position)
    gap = position
    while True:
        position = _next(position, last)
        slot = _slot(m, position)
        if slot == _0:
            break
        home = _home(m, slot >> _32)
        if (position - home) & last >= (position - gap) & last:
            _set_slot(m, gap, slot)
            gap = position
    _set_slot(m, gap, _0)


@device
def move(m: EngineRows, slots: np.uint64) -> None:
    """Move at least so many of the former slots, if there are any, up to the next gap."""
    if m.state[MOVED] == ALL:
        return
    start, moved, last = m.state[START], m.state[MOVED], _last(m, FORMER)
    until = min(moved + slots, last + _1)
    while True:
        position = FORMER | ((start + moved) & last)
        slot = _slot(m, position)
        moved += _1
        if slot:
            _set_slot(m, position, _0)
            m.slots[_gap_from(m, (slot >> _32) >> (_32 - m.state[SLOT_BITS]))] = slot
        elif moved >= until:
            break
    m.state[MOVED] = ALL if moved > last else moved


@device
def _gap_from(m: EngineRows, position: np.uint64) -> np.uint64:
    """The first empty one of the present slots from a position on."""
    last = _last(m, position)
    while m.slots[position] != _0:
        position = (position + _1) & last
    return position
