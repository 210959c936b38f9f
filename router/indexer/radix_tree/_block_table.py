"""A hash table with open addressing, in sub-tables that grow independently.

    key × multiplier = mixed: │ sub-table │ home slot, scaled to the capacity │ … │

A sub-table is a row of slots {mixed key, value}, in the order of mixed keys, with gaps; value 0
marks a gap. Its slots are in pages of 256, allocated from one reserved stretch of memory, so that
growing adds pages and frees none.

Invariants: mixed keys ascend; no gap lies between a key's home slot and its slot, and no slot lies
before its key's home, so that a search from the home on may stop at the first gap or larger key;
the last slot is a gap; at most 3/4 of the slots are used. The multiplier is odd, hence keys stay
distinct, and may be secret, so that callers cannot choose keys that collide.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, halves_at, prefetch, words_at

Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.uint32]

PAGE_BITS = np.uint64(8)
PAGE_SLOTS = np.uint64(1 << 8)
GROWTH_BITS = np.uint64(2)
"""A full sub-table grows by a quarter: at the worst point 60 % of the slots are used."""

EXPECTED_GROWTH = np.uint64(4)
"""Largest growth factor, in pages, of a full sub-table that is expected to get more keys. If those
keys do not come, 19 % of its slots are used.
"""

EXPECTED_PAGES = np.uint64(16)
"""Limit of pages added at once for expected keys: about 50 µs, nearly all of it for first writes to
pages."""

SPARE_SLOTS = np.uint64(16)
"""Slots behind the last home slot, for keys that are pushed beyond it."""

AHEAD = 8
"""Prefetch distance, in keys after the current one (4 to 64 were measured)."""

MISSING = np.uint64(2**64 - 1)
"""Result of a search that found nothing, or of an insertion refused at the limit."""

# Words of a table's header, from its base in the state on.
MULTIPLIER = np.uint64(0)
SUB_BITS = np.uint64(1)
COUNT = np.uint64(2)
MAX_COUNT = np.uint64(3)
NEXT_PAGE = np.uint64(4)
MAX_PAGES = np.uint64(5)
MAX_SUB_PAGES = np.uint64(6)
SLOTS = np.uint64(7)
PAGES = np.uint64(8)
CAPACITY = np.uint64(9)
USED = np.uint64(10)
INVERSE = np.uint64(11)
EXPECTED = np.uint64(12)
"""Expected growth of the number of keys, in sixteenths of the present number; 0 if unknown."""
HEADER_WORDS = 16

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)
_32 = np.uint64(32)
_64 = np.uint64(64)
_PAGE_KEYS = PAGE_SLOTS * np.uint64(3) // np.uint64(4)


class Table(NamedTuple):
    """A table as kernels see it.

    `slots`: mixed key and value of each slot, one after the other. `pages[n << sub_bits | sub]`:
    number of the n-th page of a sub-table. `capacity`, `used`: slots per sub-table.
    """

    header: Words
    slots: Words
    pages: Halves
    capacity: Halves
    used: Halves


@device
def table_at(address: np.uint64) -> Table:
    """Return the table that the header at an address describes."""
    header = words_at(address, np.uint64(HEADER_WORDS))
    subs = _1 << header[SUB_BITS]
    return Table(
        header,
        words_at(header[SLOTS], header[MAX_PAGES] * PAGE_SLOTS * np.uint64(2)),
        halves_at(header[PAGES], header[MAX_SUB_PAGES] * subs),
        halves_at(header[CAPACITY], subs),
        halves_at(header[USED], subs),
    )


@device
def mixed_of(table: Table, key: np.uint64) -> np.uint64:
    """Return the mixed form of a key: top bits give the sub-table, the next ones the home slot."""
    return key * table.header[MULTIPLIER]


@device
def sub_table_of(table: Table, mixed: np.uint64) -> np.uint64:
    """Return the sub-table that a mixed key belongs to."""
    return mixed >> (_64 - table.header[SUB_BITS])


@device
def _home(table: Table, mixed: np.uint64, capacity: np.uint64) -> np.uint64:
    rest = (mixed << table.header[SUB_BITS]) >> _32
    return (rest * (capacity - SPARE_SLOTS)) >> _32


@device
def slot_at(table: Table, sub: np.uint64, position: np.uint64) -> np.uint64:
    """Return the index of a slot's mixed key in `slots`; its value is the next word."""
    page = np.uint64(table.pages[(position >> PAGE_BITS) << table.header[SUB_BITS] | sub])
    return (page << PAGE_BITS | position & (PAGE_SLOTS - _1)) << _1


@device
def _slot_after(table: Table, sub: np.uint64, position: np.uint64, slot: np.uint64) -> np.uint64:
    """Return the index of the slot after the one at this position; mostly in the same page."""
    if (position + _1) & (PAGE_SLOTS - _1):
        return slot + _2
    return slot_at(table, sub, position + _1)


@device
def seek(table: Table, sub: np.uint64, mixed: np.uint64) -> np.uint64:
    """Return the position of a key, or the one where it belongs. The sub-table must have slots."""
    position = _home(table, mixed, np.uint64(table.capacity[sub]))
    slot = slot_at(table, sub, position)
    while table.slots[slot + _1] != _0 and table.slots[slot] < mixed:
        slot = _slot_after(table, sub, position, slot)
        position += _1
    return position


@device
def find_position(table: Table, mixed: np.uint64) -> np.uint64:
    """Return the position of a key in its sub-table. Returns MISSING if it is not there."""
    sub = sub_table_of(table, mixed)
    if table.capacity[sub] == 0:
        return MISSING
    position = seek(table, sub, mixed)
    slot = slot_at(table, sub, position)
    return position if table.slots[slot] == mixed and table.slots[slot + _1] else MISSING


@device
def look_up(table: Table, key: np.uint64) -> np.uint64:
    """Return the value of a key; 0 if it is not there."""
    mixed = mixed_of(table, key)
    sub = sub_table_of(table, mixed)
    if table.capacity[sub] == 0:
        return _0
    slot = slot_at(table, sub, seek(table, sub, mixed))
    return table.slots[slot + _1] if table.slots[slot] == mixed else _0


@device
def place(table: Table, key: np.uint64) -> np.uint64:
    """Return the slot of a key, inserted with value 0 if new. Returns MISSING if there is no room.

    The caller must replace a value of 0.
    """
    mixed = mixed_of(table, key)
    sub = sub_table_of(table, mixed)
    if table.capacity[sub] == 0 and not _grow(table, sub):
        return MISSING
    position = seek(table, sub, mixed)
    slot = slot_at(table, sub, position)
    if table.slots[slot] == mixed and table.slots[slot + _1]:
        return slot
    if table.header[COUNT] >= table.header[MAX_COUNT]:
        return MISSING
    is_crowded = bool(np.uint64(table.used[sub]) * _4 >= np.uint64(table.capacity[sub]) * _3)
    while is_crowded or not _make_gap(table, sub, position, slot):
        if not _grow(table, sub):
            return MISSING
        is_crowded = False
        position = seek(table, sub, mixed)
        slot = slot_at(table, sub, position)
    table.slots[slot] = mixed
    table.slots[slot + _1] = _0
    table.used[sub] += np.uint32(1)
    table.header[COUNT] += _1
    return slot


@device
def _make_gap(table: Table, sub: np.uint64, position: np.uint64, slot: np.uint64) -> bool:
    """Move the entries from this position up to the next gap back by one slot.

    Returns False, and moves nothing, if that would use the last slot.
    """
    end, gap = position, slot
    while table.slots[gap + _1] != _0:
        gap = _slot_after(table, sub, end, gap)
        end += _1
    if end + _1 == np.uint64(table.capacity[sub]):
        return False
    while end > position:
        end -= _1
        before = gap - _2 if (end + _1) & (PAGE_SLOTS - _1) else slot_at(table, sub, end)
        table.slots[gap] = table.slots[before]
        table.slots[gap + _1] = table.slots[before + _1]
        gap = before
    return True


@device
def erase(table: Table, sub: np.uint64, position: np.uint64) -> None:
    """Empty a slot, and move up the entries behind it that are not in their home slots."""
    capacity = np.uint64(table.capacity[sub])
    slot = slot_at(table, sub, position)
    while True:
        behind = _slot_after(table, sub, position, slot)
        position += _1
        mixed, value = table.slots[behind], table.slots[behind + _1]
        if value == _0 or _home(table, mixed, capacity) == position:
            break
        table.slots[slot], table.slots[slot + _1] = mixed, value
        slot = behind
    table.slots[slot + _1] = _0
    table.used[sub] -= np.uint32(1)
    table.header[COUNT] -= _1


@device
def _grow(table: Table, sub: np.uint64) -> bool:
    """Add pages to a sub-table and redistribute its keys. Returns False if no memory is left."""
    kept = _entries(table, sub)
    while True:
        if not _add_pages(table, sub):
            return False
        if _spread(table, sub, kept):
            return True


@device
def _add_pages(table: Table, sub: np.uint64) -> bool:
    pages = np.uint64(table.capacity[sub]) >> PAGE_BITS
    added = max(pages >> GROWTH_BITS, _1, _expected_pages(table, pages))
    first = table.header[NEXT_PAGE]
    if pages + added > table.header[MAX_SUB_PAGES] or first + added > table.header[MAX_PAGES]:
        return False
    for n in range(added):
        index = (pages + np.uint64(n)) << table.header[SUB_BITS] | sub
        table.pages[index] = np.uint32(first + np.uint64(n))
    table.header[NEXT_PAGE] = first + added
    table.capacity[sub] = np.uint32((pages + added) << PAGE_BITS)
    return True


@device
def _expected_pages(table: Table, pages: np.uint64) -> np.uint64:
    """Return the number of pages to add to a full sub-table for expected keys; may be 0.

    Keys are spread evenly over sub-tables, so none gets more than its part of the limit.
    """
    most = (table.header[MAX_COUNT] >> table.header[SUB_BITS]) // _PAGE_KEYS + _1
    wanted = min(pages * table.header[EXPECTED] >> _4, most)
    if wanted <= pages:
        return _0
    return min(wanted - pages, pages * (EXPECTED_GROWTH - _1), EXPECTED_PAGES)


@device
def _spread(table: Table, sub: np.uint64, entries: Words) -> bool:
    """Distribute ascending entries over an emptied sub-table. Returns False if they do not fit."""
    capacity = np.uint64(table.capacity[sub])
    for page in range(capacity >> PAGE_BITS):
        start = slot_at(table, sub, np.uint64(page) << PAGE_BITS)
        table.slots[start : start + (PAGE_SLOTS << _1)] = _0
    position = _0
    for i in range(len(entries)):
        position = max(position, _home(table, entries[i, 0], capacity))
        if position + _1 >= capacity:
            return False
        slot = slot_at(table, sub, position)
        table.slots[slot] = entries[i, 0]
        table.slots[slot + _1] = entries[i, 1]
        position += _1
    return True


@device
def _entries(table: Table, sub: np.uint64) -> Words:
    """Return the mixed keys, ascending, and values of a sub-table. Shape: (keys, 2).

    Gaps are written too, and overwritten by the next entry: this is faster than a branch.
    """
    pairs = np.empty((np.int64(table.used[sub]) + 1, 2), np.uint64)
    n = _0
    for page in range(np.uint64(table.capacity[sub]) >> PAGE_BITS):
        start = slot_at(table, sub, np.uint64(page) << PAGE_BITS)
        for slot in range(start, start + (PAGE_SLOTS << _1), _2):
            value = table.slots[slot + _1]
            pairs[n, 0] = table.slots[slot]
            pairs[n, 1] = value
            n += np.uint64(value != _0)
    return pairs[: np.int64(n)]


@device
def export(table: Table, sub: np.uint64) -> Words:
    """Return the keys and values of a sub-table. Shape: (keys, 2)."""
    pairs = _entries(table, sub)
    for i in range(len(pairs)):
        pairs[i, 0] *= table.header[INVERSE]
    return pairs


@device
def fetch(table: Table, key: np.uint64) -> None:
    """Prefetch a key's home slot, for a later search."""
    mixed = mixed_of(table, key)
    sub = sub_table_of(table, mixed)
    capacity = np.uint64(table.capacity[sub])
    if capacity:
        slot = slot_at(table, sub, _home(table, mixed, capacity))
        address = table.header[SLOTS] + (slot << _3)
        prefetch(address)
        prefetch(address + np.uint64(48))  # most searches end within four slots


@device
def fetch_first(table: Table, keys: Words) -> None:
    """Prefetch the slots of the first keys of a batch."""
    for i in range(min(AHEAD, len(keys))):
        fetch(table, keys[i])


@device
def fetch_ahead(table: Table, keys: Words, i: int) -> None:
    """Prefetch the slot of the key `AHEAD` positions after the i-th."""
    if i + AHEAD < len(keys):
        fetch(table, keys[i + AHEAD])
