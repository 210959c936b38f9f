"""The table of one rank's blocks, for `_held_kernel.py`: open addressing, linear probing.

    slot: │ sequence hash │ parent │ children, tiers 0 and 1 │ … 2 and 3 │ flags │     5 words, 40 B

    flags: the tier mask │ has a parent │ is used

A key's home is the top of key × multiplier. Storing never moves a slot, so that a block's parent,
most often stored just before it, is still where it was. Erasing pulls those behind back (no
tombstones), so that a table that lives for months probes no longer than a fresh one.

A full table grows without holding anybody up: one of twice the size stands beside it, and with each
key that is stored a few slots move, in the order of homes, from the first gap on, around the table.
Slots between two gaps move together, so that none is left behind whose home has moved.

    former   │ moved: empty │ cluster │ gap │ cluster │ …       a key is in the former table until
                            └─▶ present                         its home there has moved

Memory is touched as slots arrive in it, one page after the other; of a large table before, while
the former one fills. A slot is known by where its first word lies, counted in words of all memory.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.compiled import device, prefetch, words_at

Words = npt.NDArray[np.uint64]

# Words of a slot.
KEY = np.uint64(0)
PARENT = np.uint64(1)
CHILDREN = np.uint64(2)
FLAGS = np.uint64(4)
SLOT_WORDS = np.uint64(5)

# Flags.
MASK = np.uint64(15)
HAS_PARENT = np.uint64(16)
IS_USED = np.uint64(32)

# Words of the header. Two tables, of three words each: the first slot, the last position, and how
# far a spread key is shifted to be its home.
PRESENT = np.uint64(0)
FORMER = np.uint64(3)
FIRST = np.uint64(0)
LAST = np.uint64(1)
SHIFT = np.uint64(2)
MOVED = np.uint64(6)
"""How many positions of the former table have moved, from `START` on; `ALL` without one."""
START = np.uint64(7)
MULTIPLIER = np.uint64(8)
USED = np.uint64(9)
MAX_USED = np.uint64(10)
ORIGIN = np.uint64(11)
"""Where all memory begins: 0."""
HOLES = np.uint64(12)
COUNTS = np.uint64(16)
DIGESTS = np.uint64(20)
HEADER_WORDS = 24

ALL = np.uint64(2**64 - 1)
"""Of `MOVED`: there is no former table."""

MOVES = np.uint64(8)
"""Slots moved for each key stored: the former table is empty long before the present one is full,
and is never full itself."""

NOWHERE = np.uint64(2**64 - 1)
"""In place of a slot."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_3 = np.uint64(3)
_MEMORY_WORDS = np.uint64(1 << 60)


class Blocks(NamedTuple):
    """The table as kernels see it."""

    header: Words
    memory: Words


@device
def blocks_at(address: np.uint64) -> Blocks:
    """The table that the header at an address describes."""
    header = words_at(address, np.uint64(HEADER_WORDS))
    return Blocks(header, words_at(header[ORIGIN], _MEMORY_WORDS))


@device
def _is_former(blocks: Blocks, spread: np.uint64) -> bool:
    """Does a key, spread, belong to the former table?"""
    header = blocks.header
    if header[MOVED] == ALL:
        return False
    home = spread >> header[FORMER + SHIFT]
    return bool((home - header[START]) & header[FORMER + LAST] >= header[MOVED])


@device
def _table_of(blocks: Blocks, spread: np.uint64) -> np.uint64:
    """Where the words of the table begin in the header that a key, spread, belongs to."""
    return FORMER if _is_former(blocks, spread) else PRESENT


@device
def _slot_at(blocks: Blocks, table: np.uint64, position: np.uint64) -> np.uint64:
    slot: np.uint64 = blocks.header[table + FIRST] + position * SLOT_WORDS
    return slot


@device
def find(blocks: Blocks, key: np.uint64) -> np.uint64:
    """The slot of a key, or the gap where it would be."""
    spread = key * blocks.header[MULTIPLIER]
    if _is_former(blocks, spread):
        return _search(blocks, FORMER, spread, key)
    return _search(blocks, PRESENT, spread, key)


@device
def _search(blocks: Blocks, table: np.uint64, spread: np.uint64, key: np.uint64) -> np.uint64:
    last, position = blocks.header[table + LAST], spread >> blocks.header[table + SHIFT]
    slot = _slot_at(blocks, table, position)
    while blocks.memory[slot + FLAGS] != _0 and blocks.memory[slot + KEY] != key:
        position = (position + _1) & last
        slot = _slot_at(blocks, table, position)
    return slot


@device
def place(blocks: Blocks, key: np.uint64) -> np.uint64:
    """The slot of a key, which may be new; there has to be room."""
    slot = find(blocks, key)
    if blocks.memory[slot + FLAGS] == _0:
        for word in range(SLOT_WORDS):
            blocks.memory[slot + np.uint64(word)] = _0
        blocks.memory[slot + KEY] = key
        blocks.memory[slot + FLAGS] = IS_USED
        blocks.header[USED] += _1
    return slot


@device
def _copy(blocks: Blocks, slot: np.uint64, to: np.uint64) -> None:
    for word in range(SLOT_WORDS):
        blocks.memory[to + np.uint64(word)] = blocks.memory[slot + np.uint64(word)]


@device
def erase(blocks: Blocks, slot: np.uint64) -> None:
    """Empty a slot, and pull back those behind it that are not at home."""
    multiplier = blocks.header[MULTIPLIER]
    table = _table_of(blocks, blocks.memory[slot + KEY] * multiplier)
    last, shift = blocks.header[table + LAST], blocks.header[table + SHIFT]
    gap = position = (slot - blocks.header[table + FIRST]) // SLOT_WORDS
    while True:
        position = (position + _1) & last
        behind = _slot_at(blocks, table, position)
        if blocks.memory[behind + FLAGS] == _0:
            break
        home = (blocks.memory[behind + KEY] * multiplier) >> shift
        if (position - home) & last >= (position - gap) & last:
            _copy(blocks, behind, _slot_at(blocks, table, gap))
            gap = position
    blocks.memory[_slot_at(blocks, table, gap) + FLAGS] = _0
    blocks.header[USED] -= _1


@device
def fetch(blocks: Blocks, keys: Words, i: int) -> None:
    """Start to fetch a key's home, for a search that comes later."""
    if i < len(keys):
        spread = keys[i] * blocks.header[MULTIPLIER]
        table = _table_of(blocks, spread)
        slot = _slot_at(blocks, table, spread >> blocks.header[table + SHIFT])
        address = blocks.header[ORIGIN] + (slot << _3)
        prefetch(address)
        prefetch(address + np.uint64(64))  # most searches end there


@device
def move(blocks: Blocks, slots: np.uint64) -> None:
    """Move at least so many slots of the former table, if there is one, up to the next gap."""
    header = blocks.header
    if header[MOVED] == ALL:
        return
    last, shift = header[FORMER + LAST], header[PRESENT + SHIFT]
    moved, until = header[MOVED], min(header[MOVED] + slots, last + _1)
    while True:
        slot = _slot_at(blocks, FORMER, (header[START] + moved) & last)
        is_gap = blocks.memory[slot + FLAGS] == _0
        moved += _1
        if is_gap and moved >= until:
            break
        if not is_gap:
            position = (blocks.memory[slot + KEY] * header[MULTIPLIER]) >> shift
            _copy(blocks, slot, _gap_from(blocks, position))
            blocks.memory[slot + FLAGS] = _0
    header[MOVED] = ALL if moved > last else moved


@device
def _gap_from(blocks: Blocks, position: np.uint64) -> np.uint64:
    """The first empty slot of the present table from a position on."""
    slot = _slot_at(blocks, PRESENT, position)
    while blocks.memory[slot + FLAGS] != _0:
        position = (position + _1) & blocks.header[PRESENT + LAST]
        slot = _slot_at(blocks, PRESENT, position)
    return slot


@device
def begin_to_move(blocks: Blocks) -> None:
    """The present table, all of whose slots are in place, is the former one from now on."""
    header = blocks.header
    for word in range(_3):
        header[FORMER + np.uint64(word)] = header[PRESENT + np.uint64(word)]
    start = _0
    while blocks.memory[_slot_at(blocks, FORMER, start) + FLAGS] != _0:
        start += _1
    header[START], header[MOVED] = (start + _1) & header[FORMER + LAST], _0
