"""What is stored in and removed from the table of one rank's blocks, for `held.py`.

`address` is where the header lies that describes the table (`_held_table`).
"""

import numpy as np

from router.compiled import device, kernel
from router.protocol.values import FASTEST_TIER, TIERS
from router.publisher._held_table import (
    ALL,
    CHILDREN,
    COUNTS,
    DIGESTS,
    FIRST,
    FLAGS,
    FORMER,
    HAS_PARENT,
    HOLES,
    KEY,
    LAST,
    MASK,
    MAX_USED,
    MOVED,
    MOVES,
    NOWHERE,
    PARENT,
    PRESENT,
    SLOT_WORDS,
    USED,
    Blocks,
    Words,
    begin_to_move,
    blocks_at,
    erase,
    fetch,
    find,
    move,
    place,
)
from router.sequence._digest import mix

DONE_BITS = 32
"""Of a store's progress: keys got through, above; keys that were new, below."""

AHEAD = 8
"""Keys whose slots are on their way from memory while one is worked on."""

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


@device
def _fetch_first(blocks: Blocks, keys: Words, start: int) -> None:
    for i in range(start, start + AHEAD):
        fetch(blocks, keys, i)


@device
def _fastest(blocks: Blocks, slot: np.uint64) -> np.uint64:
    return _FASTEST[blocks.memory[slot + FLAGS] & MASK]


@device
def _is_needed(blocks: Blocks, slot: np.uint64) -> bool:
    """Is it held, or has it held children?"""
    children = blocks.memory[slot + CHILDREN] | blocks.memory[slot + CHILDREN + _1]
    return bool(children != _0 or blocks.memory[slot + FLAGS] & MASK != _0)


@device
def _add_child(blocks: Blocks, slot: np.uint64, tier: np.uint64, change: np.uint64) -> None:
    if tier < _NONE:
        word = slot + CHILDREN + (tier >> _1)
        blocks.memory[word] += change << ((tier & _1) << _5)


@device
def _count_below(blocks: Blocks, slot: np.uint64, before: np.uint64, after: np.uint64) -> None:
    """Its fastest tier changed: so did which of its children are holes."""
    sign = _1 if after > before else _0 - _1
    children = _0
    for t in range(max(before, after)):
        tier = np.uint64(t)
        word = blocks.memory[slot + CHILDREN + (tier >> _1)]
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
    blocks.memory[slot + FLAGS] |= bit
    after = _fastest(blocks, slot)
    if before != after:
        _count_below(blocks, slot, before, after)
    if not blocks.memory[slot + FLAGS] & HAS_PARENT:
        if not has_parent:
            return
        blocks.memory[slot + PARENT] = parent
        blocks.memory[slot + FLAGS] |= HAS_PARENT
        before = _NONE  # to its parent it is new
    if before != after:
        known = blocks.memory[slot + PARENT]
        is_at_hand = given != NOWHERE and known == parent
        above = given if is_at_hand else place(blocks, known)
        _count_above(blocks, above, before, after)


@device
def _drop(blocks: Blocks, slot: np.uint64, bit: np.uint64) -> None:
    """Hold a block in one tier less, and keep neither it nor its parent without need."""
    before = _fastest(blocks, slot)
    blocks.memory[slot + FLAGS] &= ~bit
    after = _fastest(blocks, slot)
    if before == after:
        return
    _count_below(blocks, slot, before, after)
    parent, is_parent_idle = blocks.memory[slot + PARENT], False
    if blocks.memory[slot + FLAGS] & HAS_PARENT:
        above = find(blocks, parent)
        _count_above(blocks, above, before, after)
        is_parent_idle = not _is_needed(blocks, above)
    if not _is_needed(blocks, slot):
        erase(blocks, slot)
    if is_parent_idle:
        above = find(blocks, parent)
        if blocks.memory[above + FLAGS] and not _is_needed(blocks, above):
            erase(blocks, above)


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
    blocks, bit, given = blocks_at(np.uint64(address)), _1 << np.uint64(tier), NOWHERE
    i, count, digest = progress >> DONE_BITS, progress & ((1 << DONE_BITS) - 1), _0
    above, has_parent, before = (keys[i - 1] if i else _0), True, count
    path = _path_of(paths, np.uint64(i))
    move(blocks, MOVES * np.uint64(len(keys) - i))
    _fetch_first(blocks, keys, i)
    while i < len(keys) and blocks.header[USED] + _2 <= blocks.header[MAX_USED]:
        fetch(blocks, keys, i + AHEAD)
        if path < np.uint64(len(paths)) and paths[path] == np.uint64(i):
            above, has_parent, given = paths[path + _1], paths[path + _2] != _0, NOWHERE
            path += _3
        key = keys[i]
        slot = place(blocks, key)
        if not blocks.memory[slot + FLAGS] & bit:
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
    blocks, bit = blocks_at(np.uint64(address)), _1 << np.uint64(tier)
    count, digest = 0, _0
    _fetch_first(blocks, keys, 0)
    for i in range(len(keys)):
        fetch(blocks, keys, i + AHEAD)
        key = keys[i]
        slot = find(blocks, key)
        if blocks.memory[slot + FLAGS] & bit:
            _drop(blocks, slot, bit)
            changed[count] = key
            count += 1
            digest ^= mix(key)
    blocks.header[COUNTS + np.uint64(tier)] -= np.uint64(count)
    blocks.header[DIGESTS + np.uint64(tier)] ^= digest
    return count


@device
def _list_table(blocks: Blocks, table: np.uint64, bit: np.uint64, out: Words, count: int) -> int:
    """Write the slots of one table's blocks that are held in a tier; how many there are then."""
    first = blocks.header[table + FIRST]
    for position in range(_0, blocks.header[table + LAST] + _1):
        slot = first + position * SLOT_WORDS
        if blocks.memory[slot + FLAGS] & bit:
            out[count] = slot
            count += 1
    return count


@device
def _list_slots(blocks: Blocks, tier: int, out: Words) -> int:
    """The slots of all blocks held in a tier, and how many there are."""
    bit = _1 << np.uint64(tier)
    count = _list_table(blocks, PRESENT, bit, out, 0)
    if blocks.header[MOVED] != ALL:
        count = _list_table(blocks, FORMER, bit, out, count)
    return count


@kernel(f"void(int64, int64, {_OUT})")
def list_held(address: int, tier: int, out: Words) -> None:
    """Every block held in a tier, in no order; `out` has room for exactly these."""
    blocks = blocks_at(np.uint64(address))
    for i in range(_list_slots(blocks, tier, out)):
        out[i] = blocks.memory[out[i] + KEY]


@kernel(f"void(int64, int64, {_OUT})")
def list_paths(address: int, tier: int, out: Words) -> None:
    """The same with what comes before each: hashes, parents, and 1 where there is one; a third of
    `out` each.
    """
    blocks = blocks_at(np.uint64(address))
    held = _list_slots(blocks, tier, out)
    for i in range(held):
        slot = out[i]
        has_parent = blocks.memory[slot + FLAGS] & HAS_PARENT != _0
        out[i] = blocks.memory[slot + KEY]
        out[held + i] = blocks.memory[slot + PARENT] if has_parent else _0
        out[2 * held + i] = _1 if has_parent else _0


@kernel(f"int64(int64, int64, {_KEYS}, {_OUT})")
def absent(address: int, tier: int, keys: Words, out: Words) -> int:
    """Those that are not held in a tier are written to `out`; returns how many."""
    blocks, bit, count = blocks_at(np.uint64(address)), _1 << np.uint64(tier), 0
    _fetch_first(blocks, keys, 0)
    for i in range(len(keys)):
        fetch(blocks, keys, i + AHEAD)
        if not blocks.memory[find(blocks, keys[i]) + FLAGS] & bit:
            out[count] = keys[i]
            count += 1
    return count


@kernel("void(int64)")
def grow(address: int) -> None:
    """All of the present table is in place; from now on it is the former one."""
    blocks = blocks_at(np.uint64(address))
    move(blocks, ALL >> _1)
    begin_to_move(blocks)
