"""The rows of one rank's engine map, and the slots that index them.

    engine hash × multiplier = │ spread, 32 bits │ …        slot (8 bytes)   spread │ row + 1
                                  │ its top: home                              0: a gap
                                    ▼
    row (40 bytes)   key │ sequence hash │ parent, children │ copies per tier │ context, flags

Rows and slots are counted from 0 here, but from 1 where they are stored, so that 0 is none. A row
is passed as the index of its first word.

Slots are a table of `_growing_table.py`. A slot holds all bits of the spread, so that slots are
moved and shifted back without reading their rows, each of which would be a cache miss. At most 3/4
of the slots are used.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.runtime.kernels._growing_table import (
    FORMER,
    LAST,
    PRESENT,
    SHIFT,
    TABLE_WORDS,
    Table,
    Words,
    home_slot,
    is_former,
    prefetch_slot,
    slot_at,
    table_of_header,
)
from router.runtime.kernels.numba_runtime import device, halves_at, prefetch, words_at

Halves = npt.NDArray[np.uint32]

# Words of the state, after those of the table of slots: addresses and sizes of the arrays.
ROWS = TABLE_WORDS
ROW_CAPACITY = 10
SEEDS = 11
USES = 12
CONTEXTS = 13
# Rows in use and free, and the list of retired rows. Rows are counted from 1, 0 is none.
USED_ROWS = 14
FREE_ROW = 15
OLDEST = 16
NEWEST = 17
POOL_BLOCKS = 18
POOL_IS_KNOWN = 19
# Sums over the rows.
COUNT = 20
DEAD = 21
ORPHANS = 22
COPIES = 23  # One word per tier.
# Counters since the start.
UNKNOWN_REMOVALS = 27
OVER_REMOVALS = 28
SATURATED = 29
UNCOUNTED = 30
STATE_WORDS = 31

ROW_WORDS = 5
# Word indexes within a row.
KEY = np.uint64(0)
SEQUENCE = np.uint64(1)
LINKS = np.uint64(2)
HELD = np.uint64(3)
META = np.uint64(4)
# Flags of a row's META word, above its context.
IN_USE = np.uint64(1 << 32)
NAMED = np.uint64(1 << 33)
BURIED = np.uint64(1 << 34)

NOWHERE = np.uint64(2**64 - 1)
"""The result of a search that finds nothing."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_8 = np.uint64(8)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(0xFFFFFFFF00000000)
_WIDTH = np.uint64(ROW_WORDS)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_AHEAD = 16


class EngineRows(NamedTuple):
    """A map, as kernels access it; `uses` counts named rows per context."""

    state: Words
    rows: Words
    slots: Table
    seeds: Words
    uses: Halves


@device
def rows_at(address: np.uint64) -> EngineRows:
    """Return the map that the state at an address describes."""
    state = words_at(address, np.uint64(STATE_WORDS))
    return EngineRows(
        state,
        words_at(state[ROWS], state[ROW_CAPACITY] * _WIDTH),
        table_of_header(state, _1, _0, _1),
        words_at(state[SEEDS], state[CONTEXTS]),
        halves_at(state[USES], state[CONTEXTS]),
    )


@device
def _spread(key: np.uint64) -> np.uint64:
    """Return the upper half of a slot: 32 bits of a key, the top bits of which are its home."""
    spread: np.uint64 = (key * _MULTIPLIER) & _HIGH
    return spread


def spread_of(key: int) -> int:
    """Return what `_spread` returns, outside of kernels."""
    return key * int(_MULTIPLIER) & int(_HIGH)


@device
def slot_of(m: EngineRows, key: np.uint64) -> np.uint64:
    """Return the slot of a key, or the gap where it would be stored."""
    if is_former(m.slots, _spread(key)):
        return _search(m, FORMER, key)
    return _search(m, PRESENT, key)


@device
def _search(m: EngineRows, part: np.uint64, key: np.uint64) -> np.uint64:
    spread, last = _spread(key), m.slots.header[part + LAST]
    position = spread >> m.slots.header[part + SHIFT]
    while True:
        slot = slot_at(m.slots, part, position)
        word = m.slots.memory[slot]
        if word == _0:
            return slot
        if word & _HIGH == spread and m.rows[_row_of(word) + KEY] == key:
            return slot
        position = (position + _1) & last


@device
def row_in(m: EngineRows, slot: np.uint64) -> np.uint64:
    """Return the begin of the row in a slot, or NOWHERE for a gap."""
    return _row_of(m.slots.memory[slot])


@device
def _row_of(word: np.uint64) -> np.uint64:
    if word == _0:
        return NOWHERE
    row: np.uint64 = ((word & _LOW) - _1) * _WIDTH
    return row


@device
def find(m: EngineRows, key: np.uint64) -> np.uint64:
    """Return the begin of the row of a key, or NOWHERE."""
    return row_in(m, slot_of(m, key))


@device
def fetch(m: EngineRows, hashes: Words, group: np.uint64, i: int) -> None:
    """Prefetch slots and rows for the next searches of a pass over `hashes` that begins at 0."""
    first = i if i else -_AHEAD
    for n in range(first + _AHEAD, min(i + _AHEAD + 1, len(hashes))):
        prefetch_slot(m.slots, home_slot(m.slots, _spread(hashes[n] ^ group)))
    n = i + _AHEAD // 2
    if n < len(hashes):
        _fetch_row(m, home_slot(m.slots, _spread(hashes[n] ^ group)))


@device
def _fetch_row(m: EngineRows, slot: np.uint64) -> None:
    row = row_in(m, slot)
    if row != NOWHERE:
        prefetch(m.state[ROWS] + row * _8)


@device
def lay(m: EngineRows, slot: np.uint64, row: np.uint64) -> None:
    """Store a row that is in no slot yet in a gap."""
    m.slots.memory[slot] = _spread(m.rows[row + KEY]) | (row // _WIDTH + _1)


@device
def add(m: EngineRows, key: np.uint64) -> np.uint64:
    """Add a row without name and copies for a key that has none. There must be room."""
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
