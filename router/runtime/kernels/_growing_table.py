"""A hash table that grows without a pause, for kernels: open addressing, linear probing.

    slot: │ key, or a word with the key's home on top │ … │    `width` words; empty if `mark` is 0

A key's home is the top bits of its first word × multiplier. Storing never moves a slot. Erasing
shifts the following slots back and leaves no tombstones, so that a table that lives for months
probes no longer than a fresh one.

A full table grows step by step: a larger table is allocated, and each stored key moves a few slots
into it, in the order of homes, from the first gap on, around the table. All slots between two gaps
move together, so that no slot stays behind after its home has moved.

    former   │ moved: empty │ cluster │ gap │ cluster │ …       a key is in the former table until
                            └─▶ present                         its home there has moved

A slot is identified by the address of its first word, divided by 8. The owner's header begins with
`TABLE_WORDS` words of the table; `growing_table.py` owns the memory.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, prefetch, words_at

Words = npt.NDArray[np.uint64]

# Word indexes within the header. Each of the two tables has three words: the first slot, the last
# position, and the shift that turns a spread key into its home.
PRESENT = np.uint64(0)
FORMER = np.uint64(3)
FIRST = np.uint64(0)
LAST = np.uint64(1)
SHIFT = np.uint64(2)
MOVED = np.uint64(6)
"""The number of positions of the former table that have moved, from `START` on, or `ALL`."""
START = np.uint64(7)
ORIGIN = np.uint64(8)
"""The origin of slot indexes: address 0."""
TABLE_WORDS = 9

ALL = np.uint64(2**64 - 1)
"""The value of `MOVED` without a former table."""

MOVES = np.uint64(8)
"""The number of slots moved for each stored key. It is large enough that the former table is empty
long before the present one is full, and is never full itself."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_3 = np.uint64(3)
_MEMORY_WORDS = np.uint64(1 << 60)


class Table(NamedTuple):
    """A table, as kernels access it. `mark`: the word of a slot that is 0 in an empty one."""

    header: Words
    memory: Words
    width: np.uint64
    mark: np.uint64
    multiplier: np.uint64


@device
def table_of_header(
    header: Words, width: np.uint64, mark: np.uint64, multiplier: np.uint64
) -> Table:
    """Return the table that a header describes."""
    return Table(header, words_at(header[ORIGIN], _MEMORY_WORDS), width, mark, multiplier)


@device
def is_former(table: Table, spread: np.uint64) -> bool:
    """Return whether a spread key belongs to the former table."""
    header = table.header
    if header[MOVED] == ALL:
        return False
    home = spread >> header[FORMER + SHIFT]
    return bool((home - header[START]) & header[FORMER + LAST] >= header[MOVED])


@device
def slot_at(table: Table, part: np.uint64, position: np.uint64) -> np.uint64:
    """Return the slot at a position of a part: the present or the former table."""
    slot: np.uint64 = table.header[part + FIRST] + position * table.width
    return slot


@device
def is_used(table: Table, slot: np.uint64) -> bool:
    """Return whether a slot is not empty."""
    return bool(table.memory[slot + table.mark] != _0)


@device
def find(table: Table, key: np.uint64) -> np.uint64:
    """Return the slot that begins with a key, or the gap where it would be stored."""
    spread = key * table.multiplier
    if is_former(table, spread):
        return _search(table, FORMER, spread, key)
    return _search(table, PRESENT, spread, key)


@device
def _search(table: Table, part: np.uint64, spread: np.uint64, key: np.uint64) -> np.uint64:
    last, position = table.header[part + LAST], spread >> table.header[part + SHIFT]
    slot = slot_at(table, part, position)
    while is_used(table, slot) and table.memory[slot] != key:
        position = (position + _1) & last
        slot = slot_at(table, part, position)
    return slot


@device
def home_slot(table: Table, spread: np.uint64) -> np.uint64:
    """Return the slot at which the search for a spread key begins."""
    part = FORMER if is_former(table, spread) else PRESENT
    return slot_at(table, part, spread >> table.header[part + SHIFT])


@device
def prefetch_slot(table: Table, slot: np.uint64) -> None:
    """Prefetch the cache line of a slot."""
    prefetch(table.header[ORIGIN] + (slot << _3))


@device
def _copy(table: Table, slot: np.uint64, to: np.uint64) -> None:
    for word in range(table.width):
        table.memory[to + np.uint64(word)] = table.memory[slot + np.uint64(word)]


@device
def close(table: Table, slot: np.uint64) -> None:
    """Empty a slot, and shift back the following slots that are not at their homes."""
    header = table.header
    part = FORMER if is_former(table, table.memory[slot] * table.multiplier) else PRESENT
    last, shift = header[part + LAST], header[part + SHIFT]
    gap = position = (slot - header[part + FIRST]) // table.width
    while True:
        position = (position + _1) & last
        behind = slot_at(table, part, position)
        if not is_used(table, behind):
            break
        home = (table.memory[behind] * table.multiplier) >> shift
        if (position - home) & last >= (position - gap) & last:
            _copy(table, behind, slot_at(table, part, gap))
            gap = position
    table.memory[slot_at(table, part, gap) + table.mark] = _0


@device
def move(table: Table, slots: np.uint64) -> None:
    """Move at least `slots` slots of the former table, if there is one, up to the next gap."""
    header = table.header
    if header[MOVED] == ALL:
        return
    last, shift = header[FORMER + LAST], header[PRESENT + SHIFT]
    moved, until = header[MOVED], min(header[MOVED] + slots, last + _1)
    while True:
        slot = slot_at(table, FORMER, (header[START] + moved) & last)
        is_gap = not is_used(table, slot)
        moved += _1
        if is_gap and moved >= until:
            break
        if not is_gap:
            _copy(table, slot, _gap_from(table, (table.memory[slot] * table.multiplier) >> shift))
            table.memory[slot + table.mark] = _0
    header[MOVED] = ALL if moved > last else moved


@device
def _gap_from(table: Table, position: np.uint64) -> np.uint64:
    """Return the first empty slot of the present table from a position on."""
    slot = slot_at(table, PRESENT, position)
    while is_used(table, slot):
        position = (position + _1) & table.header[PRESENT + LAST]
        slot = slot_at(table, PRESENT, position)
    return slot


@device
def begin_to_move(table: Table) -> None:
    """Finish the current move, then make the present table the former one."""
    header = table.header
    move(table, ALL >> _1)
    for word in range(_3):
        header[FORMER + np.uint64(word)] = header[PRESENT + np.uint64(word)]
    start = _0
    while is_used(table, slot_at(table, FORMER, start)):
        start += _1
    header[START], header[MOVED] = (start + _1) & header[FORMER + LAST], _0
