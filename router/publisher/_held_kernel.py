"""The blocks of one rank in one table, for `held.py`: open addressing, linear probing.

    slot: │ sequence hash │ parent │ children, tiers 0 and 1 │ … 2 and 3 │ flags │     5 words, 40 B

    flags: the tier mask │ has a parent │ is used

A key's home is the top of key × multiplier. Storing never moves a slot, so that a block's parent,
most often stored just before it, is still where it was. Erasing pulls those behind back (no
tombstones), so that a table that lives for months probes no longer than a fresh one. `address` is
where the header lies that describes the table.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.compiled import device, kernel, prefetch, words_at
from router.protocol.values import FASTEST_TIER, TIERS
from router.sequence._digest import mix

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

# Words of the header.
MULTIPLIER = np.uint64(0)
SHIFT = np.uint64(1)
CAPACITY = np.uint64(2)
USED = np.uint64(3)
MAX_USED = np.uint64(4)
SLOTS = np.uint64(5)
HOLES = np.uint64(8)
COUNTS = np.uint64(12)
DIGESTS = np.uint64(16)
HEADER_WORDS = 20

DONE_BITS = 32
"""Of a store's progress: keys got through, above; keys that were new, below."""

AHEAD = 8
"""Keys whose slots are on their way from memory while one is worked on."""

NOWHERE = np.uint64(2**64 - 1)

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_5 = np.uint64(5)
_NONE = np.uint64(TIERS)
_COUNT = np.uint64(0xFFFF_FFFF)
_FASTEST = np.array(FASTEST_TIER, np.uint64)
_KEYS = "Array(uint64, 1, 'C', readonly=True, aligned=False)"
_OUT = "Array(uint64, 1, 'C')"


class Blocks(NamedTuple):
    """The table as kernels see it."""

    header: Words
    slots: Words


@device
def _blocks_at(address: np.uint64) -> Blocks:
    header = words_at(address, np.uint64(HEADER_WORDS))
    return Blocks(header, words_at(header[SLOTS], header[CAPACITY] * SLOT_WORDS))


@device
def _home(blocks: Blocks, key: np.uint64) -> np.uint64:
    return (key * blocks.header[MULTIPLIER]) >> blocks.header[SHIFT]


@device
def _find(blocks: Blocks, key: np.uint64) -> np.uint64:
    """The slot of a key, or the gap where it would be."""
    last, position = blocks.header[CAPACITY] - _1, _home(blocks, key)
    slot = position * SLOT_WORDS
    while blocks.slots[slot + FLAGS] != _0 and blocks.slots[slot + KEY] != key:
        position = (position + _1) & last
        slot = position * SLOT_WORDS
    return slot


@device
def _place(blocks: Blocks, key: np.uint64) -> np.uint64:
    """The slot of a key, which may be new; there has to be room."""
    slot = _find(blocks, key)
    if blocks.slots[slot + FLAGS] == _0:
        for word in range(SLOT_WORDS):
            blocks.slots[slot + np.uint64(word)] = _0
        blocks.slots[slot + KEY] = key
        blocks.slots[slot + FLAGS] = IS_USED
        blocks.header[USED] += _1
    return slot


@device
def _erase(blocks: Blocks, slot: np.uint64) -> None:
    """Empty a slot, and pull back those behind it that are not at home."""
    last, gap = blocks.header[CAPACITY] - _1, slot // SLOT_WORDS
    position = gap
    while True:
        position = (position + _1) & last
        behind = position * SLOT_WORDS
        if blocks.slots[behind + FLAGS] == _0:
            break
        home = _home(blocks, blocks.slots[behind + KEY])
        if (position - home) & last >= (position - gap) & last:
            for word in range(SLOT_WORDS):
                moved = blocks.slots[behind + np.uint64(word)]
                blocks.slots[gap * SLOT_WORDS + np.uint64(word)] = moved
            gap = position
    blocks.slots[gap * SLOT_WORDS + FLAGS] = _0
    blocks.header[USED] -= _1


@device
def _fetch(blocks: Blocks, keys: Words, i: int) -> None:
    """Start to fetch a key's home, for a search that comes later."""
    if i < len(keys):
        slot = _home(blocks, keys[i]) * SLOT_WORDS
        address = blocks.header[SLOTS] + (slot << _3)
        prefetch(address)
        prefetch(address + np.uint64(64))  # most searches end there


@device
def _fetch_first(blocks: Blocks, keys: Words, start: int) -> None:
    for i in range(start, start + AHEAD):
        _fetch(blocks, keys, i)


@device
def _fastest(blocks: Blocks, slot: np.uint64) -> np.uint64:
    return _FASTEST[blocks.slots[slot + FLAGS] & MASK]


@device
def _is_needed(blocks: Blocks, slot: np.uint64) -> bool:
    """Is it held, or has it held children?"""
    children = blocks.slots[slot + CHILDREN] | blocks.slots[slot + CHILDREN + _1]
    return bool(children != _0 or blocks.slots[slot + FLAGS] & MASK != _0)


@device
def _add_child(blocks: Blocks, slot: np.uint64, tier: np.uint64, change: np.uint64) -> None:
    if tier < _NONE:
        word = slot + CHILDREN + (tier >> _1)
        blocks.slots[word] += change << ((tier & _1) << _5)


@device
def _count_below(blocks: Blocks, slot: np.uint64, before: np.uint64, after: np.uint64) -> None:
    """Its fastest tier changed: so did which of its children are holes."""
    sign = _1 if after > before else _0 - _1
    children = _0
    for t in range(max(before, after)):
        tier = np.uint64(t)
        word = blocks.slots[slot + CHILDREN + (tier >> _1)]
        children += word >> ((tier & _1) << _5) & _COUNT
        if tier >= min(before, after):
            blocks.header[HOLES + tier] += sign * children


@device
def _count_above(blocks: Blocks, above: np.uint64, before: np.uint64, after: np.uint64) -> None:
    """The fastest tier of a child of this block changed: so did whether that child is a hole."""
    tier_above = _fastest(blocks, above)
    for tier in range(before, tier_above):
        blocks.header[HOLES + np.uint64(tier)] -= _1
    for tier in range(after, tier_above):
        blocks.header[HOLES + np.uint64(tier)] += _1
    _add_child(blocks, above, before, _0 - _1)
    _add_child(blocks, above, after, _1)


@device
def _hold(
    blocks: Blocks,
    slot: np.uint64,
    bit: np.uint64,
    parent: np.uint64,
    has_parent: bool,
    given: np.uint64,
) -> None:
    """Hold a block in one more tier. `given`: the slot of the parent given, if it is at hand."""
    before = _fastest(blocks, slot)
    blocks.slots[slot + FLAGS] |= bit
    after = _fastest(blocks, slot)
    if before != after:
        _count_below(blocks, slot, before, after)
    if not blocks.slots[slot + FLAGS] & HAS_PARENT:
        if not has_parent:
            return
        blocks.slots[slot + PARENT] = parent
        blocks.slots[slot + FLAGS] |= HAS_PARENT
        before = _NONE  # to its parent it is new
    if before != after:
        known = blocks.slots[slot + PARENT]
        is_at_hand = given != NOWHERE and known == parent
        above = given if is_at_hand else _place(blocks, known)
        _count_above(blocks, above, before, after)


@device
def _drop(blocks: Blocks, slot: np.uint64, bit: np.uint64) -> None:
    """Hold a block in one tier less, and keep neither it nor its parent without need."""
    before = _fastest(blocks, slot)
    blocks.slots[slot + FLAGS] &= ~bit
    after = _fastest(blocks, slot)
    if before == after:
        return
    _count_below(blocks, slot, before, after)
    parent, is_parent_idle = blocks.slots[slot + PARENT], False
    if blocks.slots[slot + FLAGS] & HAS_PARENT:
        above = _find(blocks, parent)
        _count_above(blocks, above, before, after)
        is_parent_idle = not _is_needed(blocks, above)
    if not _is_needed(blocks, slot):
        _erase(blocks, slot)
    if is_parent_idle:
        above = _find(blocks, parent)
        if blocks.slots[above + FLAGS] and not _is_needed(blocks, above):
            _erase(blocks, above)


@device
def _path_of(paths: Words, i: np.uint64) -> np.uint64:
    """The word at which the first path begins that has none of the keys before `i`."""
    path = _0
    while path < np.uint64(len(paths)) and paths[path] < i:
        path += _3
    return path


@kernel(f"int64(int64, int64, {_KEYS}, {_KEYS}, int64, {_OUT})")
def store(address: int, tier: int, keys: Words, paths: Words, progress: int, changed: Words) -> int:
    """Hold paths of blocks in a tier, from a progress (0 at first) on; returns the progress made
    before the table has to grow. Keys that were new are written to `changed`.

    `paths` has three words a path: which key is its first, what comes before that, and 1; or two
    times 0 where nothing does.
    """
    blocks, bit, given = _blocks_at(np.uint64(address)), _1 << np.uint64(tier), NOWHERE
    i, count, digest = progress >> DONE_BITS, progress & ((1 << DONE_BITS) - 1), _0
    above, has_parent, before = (keys[i - 1] if i else _0), True, count
    path = _path_of(paths, np.uint64(i))
    _fetch_first(blocks, keys, i)
    while i < len(keys) and blocks.header[USED] + _2 <= blocks.header[MAX_USED]:
        _fetch(blocks, keys, i + AHEAD)
        if path < np.uint64(len(paths)) and paths[path] == np.uint64(i):
            above, has_parent, given = paths[path + _1], paths[path + _2] != _0, NOWHERE
            path += _3
        key = keys[i]
        slot = _place(blocks, key)
        if not blocks.slots[slot + FLAGS] & bit:
            _hold(blocks, slot, bit, above, has_parent, given)
            changed[count] = key
            count += 1
            digest ^= mix(key)
        above, has_parent, given = key, True, slot
        i += 1
    blocks.header[COUNTS + np.uint64(tier)] += np.uint64(count - before)
    blocks.header[DIGESTS + np.uint64(tier)] ^= digest
    return i << DONE_BITS | count


@kernel(f"int64(int64, int64, {_KEYS}, {_OUT})")
def remove(address: int, tier: int, keys: Words, changed: Words) -> int:
    """Hold blocks in a tier no longer. Those that were held are written to `changed`; returns how
    many.
    """
    blocks, bit = _blocks_at(np.uint64(address)), _1 << np.uint64(tier)
    count, digest = 0, _0
    _fetch_first(blocks, keys, 0)
    for i in range(len(keys)):
        _fetch(blocks, keys, i + AHEAD)
        key = keys[i]
        slot = _find(blocks, key)
        if blocks.slots[slot + FLAGS] & bit:
            _drop(blocks, slot, bit)
            changed[count] = key
            count += 1
            digest ^= mix(key)
    blocks.header[COUNTS + np.uint64(tier)] -= np.uint64(count)
    blocks.header[DIGESTS + np.uint64(tier)] ^= digest
    return count


@kernel(f"void(int64, int64, {_OUT})")
def list_held(address: int, tier: int, out: Words) -> None:
    """Every block held in a tier, in no order; `out` has room for exactly these."""
    blocks, bit, count = _blocks_at(np.uint64(address)), _1 << np.uint64(tier), _0
    for slot in range(_0, blocks.header[CAPACITY] * SLOT_WORDS, SLOT_WORDS):
        if blocks.slots[slot + FLAGS] & bit:
            out[count] = blocks.slots[slot + KEY]
            count += _1


@kernel(f"void(int64, int64, {_OUT})")
def list_paths(address: int, tier: int, out: Words) -> None:
    """The same with what comes before each: hashes, parents, and 1 where there is one; a third of
    `out` each.
    """
    blocks, bit, count = _blocks_at(np.uint64(address)), _1 << np.uint64(tier), 0
    held = len(out) // 3
    for slot in range(_0, blocks.header[CAPACITY] * SLOT_WORDS, SLOT_WORDS):
        if blocks.slots[slot + FLAGS] & bit:
            has_parent = blocks.slots[slot + FLAGS] & HAS_PARENT != _0
            out[count] = blocks.slots[slot + KEY]
            out[held + count] = blocks.slots[slot + PARENT] if has_parent else _0
            out[2 * held + count] = _1 if has_parent else _0
            count += 1


@kernel(f"int64(int64, int64, {_KEYS}, {_OUT})")
def absent(address: int, tier: int, keys: Words, out: Words) -> int:
    """Those that are not held in a tier are written to `out`; returns how many."""
    blocks, bit, count = _blocks_at(np.uint64(address)), _1 << np.uint64(tier), 0
    _fetch_first(blocks, keys, 0)
    for i in range(len(keys)):
        _fetch(blocks, keys, i + AHEAD)
        if not blocks.slots[_find(blocks, keys[i]) + FLAGS] & bit:
            out[count] = keys[i]
            count += 1
    return count


@kernel(f"void(int64, {_OUT})")
def move_in(address: int, old: Words) -> None:
    """Copy the slots of the table's former, smaller self. O(its capacity)."""
    blocks = _blocks_at(np.uint64(address))
    for start in range(np.uint64(0), np.uint64(len(old)), SLOT_WORDS):
        if old[start + FLAGS] != _0:
            slot = _find(blocks, old[start + KEY])
            for word in range(SLOT_WORDS):
                blocks.slots[slot + np.uint64(word)] = old[start + np.uint64(word)]
