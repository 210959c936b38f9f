"""The rows of one rank's engine map, and how they are found.

    engine hash × multiplier = │ home slot │ tag │ …        slots: tag and row + 1 in 32 bits
                                    │                              0: a gap
                                    ▼
    row (40 bytes)   key │ sequence hash │ parent, children │ copies per tier │ context, flags

Rows and slots are counted from 0 here, but from 1 where they are kept, so that 0 is none. A row is
handed around as the index of its first word.

Invariants: a search from the home slot on may stop at the first gap; at most 3/4 of the slots are
used.
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
# Rows in use and free, and the graveyard; rows are counted from 1, 0 is none.
USED_ROWS = 7
FREE_ROW = 8
OLDEST = 9
NEWEST = 10
POOL_BLOCKS = 11
POOL_IS_KNOWN = 12
# Sums.
COUNT = 13
DEAD = 14
ORPHANS = 15
COPIES = 16  # one word per tier
# What happened so far.
UNKNOWN_REMOVALS = 20
OVER_REMOVALS = 21
SATURATED = 22
UNCOUNTED = 23
STATE_WORDS = 24

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

_0 = np.uint64(0)
_1 = np.uint64(1)
_4 = np.uint64(4)
_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_WIDTH = np.uint64(ROW_WORDS)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_AHEAD = 16


class EngineRows(NamedTuple):
    """A map as kernels see it; `uses` counts named rows per context."""

    state: Words
    rows: Words
    slots: Halves
    seeds: Words
    uses: Halves


@device
def rows_at(address: np.uint64) -> EngineRows:
    """The map that the state at an address describes."""
    state = words_at(address, np.uint64(STATE_WORDS))
    return EngineRows(
        state,
        words_at(state[ROWS], state[ROW_CAPACITY] * _WIDTH),
        halves_at(state[SLOTS], _1 << state[SLOT_BITS]),
        words_at(state[SEEDS], state[CONTEXTS]),
        halves_at(state[USES], state[CONTEXTS]),
    )


@device
def _spread(key: np.uint64) -> np.uint64:
    """32 bits of a key: its home slot, then its tag."""
    spread: np.uint64 = (key * _MULTIPLIER) >> _32
    return spread


def home_of(key: int, bits: int) -> int:
    """The home slot of a key among 2^bits."""
    return (key * int(_MULTIPLIER) & (1 << 64) - 1) >> (64 - bits)


@device
def slot_of(m: EngineRows, key: np.uint64) -> np.uint64:
    """The slot of a key, or the gap it would be put into."""
    bits = m.state[SLOT_BITS]
    spread, last = _spread(key), (_1 << bits) - _1
    tag = (spread << bits) & _LOW
    position: np.uint64 = spread >> (_32 - bits)
    while True:
        slot = np.uint64(m.slots[position])
        if slot == _0:
            return position
        if slot & ~last == tag and m.rows[((slot & last) - _1) * _WIDTH + KEY] == key:
            return position
        position = (position + _1) & last


@device
def row_in(m: EngineRows, position: np.uint64) -> np.uint64:
    """Where the row in a slot begins; NOWHERE in a gap."""
    slot = np.uint64(m.slots[position])
    if slot == _0:
        return NOWHERE
    row: np.uint64 = ((slot & ((_1 << m.state[SLOT_BITS]) - _1)) - _1) * _WIDTH
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
        home = _spread(hashes[n] ^ group) >> (_32 - m.state[SLOT_BITS])
        prefetch(m.state[SLOTS] + home * _4)
    n = i + _AHEAD // 2
    if n < len(hashes):
        home = _spread(hashes[n] ^ group) >> (_32 - m.state[SLOT_BITS])
        row = row_in(m, home)
        if row != NOWHERE:
            prefetch(m.state[ROWS] + row * np.uint64(8))


@device
def lay(m: EngineRows, position: np.uint64, row: np.uint64) -> None:
    """Put a row that lies nowhere yet into a gap."""
    bits = m.state[SLOT_BITS]
    tag = (_spread(m.rows[row + KEY]) << bits) & _LOW
    m.slots[position] = np.uint32(tag | (row // _WIDTH + _1))


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
    bits = m.state[SLOT_BITS]
    last = (_1 << bits) - _1
    gap = position
    while True:
        position = (position + _1) & last
        row = row_in(m, position)
        if row == NOWHERE:
            break
        home = _spread(m.rows[row + KEY]) >> (_32 - bits)
        if (position - home) & last >= (position - gap) & last:
            m.slots[gap] = m.slots[position]
            gap = position
    m.slots[gap] = np.uint32(0)
