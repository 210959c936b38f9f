"""Kernels that store blocks in and remove blocks from one rank's table; used by `held_blocks.py`.

`address` is the address of the header that describes the table (`_held_table`).
"""

import numpy as np

from router.protocol.values import FASTEST_TIER, TIERS
from router.publisher.journal._held_table import (
    CHILDREN,
    COUNTS,
    DIGESTS,
    FLAGS,
    HAS_PARENT,
    HOLES,
    KEY,
    MASK,
    MAX_USED,
    NOWHERE,
    PARENT,
    SLOT_WORDS,
    USED,
    Blocks,
    blocks_at,
    erase,
    fetch,
    place,
)
from router.runtime.kernels._growing_table import (
    ALL,
    FIRST,
    FORMER,
    LAST,
    MOVED,
    MOVES,
    PRESENT,
    Words,
    begin_to_move,
    find,
    move,
)
from router.runtime.kernels.numba_runtime import device, kernel
from router.sequence.hashing._digest import mix

DONE_BITS = 32
"""The number of low bits of a store's progress that count new keys; keys done are above them."""

AHEAD = 8
"""The number of keys that slots are prefetched for, ahead of the current key."""

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
    """Return whether a block is held or has held children."""
    children = blocks.memory[slot + CHILDREN] | blocks.memory[slot + CHILDREN + _1]
    return bool(children != _0 or blocks.memory[slot + FLAGS] & MASK != _0)


@device
def _add_child(blocks: Blocks, slot: np.uint64, tier: np.uint64, change: np.uint64) -> None:
    if tier < _NONE:
        word = slot + CHILDREN + (tier >> _1)
        blocks.memory[word] += change << ((tier & _1) << _5)


@device
def _count_below(blocks: Blocks, slot: np.uint64, before: np.uint64, after: np.uint64) -> None:
    """Update the holes of a block's children after the block's fastest tier has changed."""
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
    """Update the holes of a block after the fastest tier of one of its children has changed."""
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
    """Hold a block in one more tier. `given`: the slot of `parent`, or NOWHERE if not known."""
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
        before = _NONE  # The parent has not counted this block yet.
    if before != after:
        known = blocks.memory[slot + PARENT]
        is_at_hand = given != NOWHERE and known == parent
        above = given if is_at_hand else place(blocks, known)
        _count_above(blocks, above, before, after)


@device
def _drop(blocks: Blocks, slot: np.uint64, bit: np.uint64) -> None:
    """Hold a block in one tier less; erase it and its parent if they are no longer needed."""
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
    """Return the word of `paths` at which the first path begins that starts at key `i` or later."""
    path = _0
    while path < np.uint64(len(paths)) and paths[path] < i:
        path += _3
    return path


@kernel(f"int64(int64, int64, {_KEYS}, {_KEYS}, int64, {_OUT})")
def store(address: int, tier: int, keys: Words, paths: Words, progress: int, changed: Words) -> int:
    """Hold paths of blocks in a tier, continuing from `progress`, which is 0 at first.

    Returns the progress made before the table has to grow. Keys that are new in the tier are
    written to `changed`.

    `paths` has three words for each path: the index of its first key, the parent of that key, and
    1; the last two are 0 if the path has no parent.
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
    """Remove blocks from a tier. Returns how many were held; these are written to `changed`."""
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
    """Write the slots of one table's blocks held in a tier to `out`, from index `count` on.

    Returns the new count.
    """
    first = blocks.header[table + FIRST]
    for position in range(_0, blocks.header[table + LAST] + _1):
        slot = first + position * SLOT_WORDS
        if blocks.memory[slot + FLAGS] & bit:
            out[count] = slot
            count += 1
    return count


@device
def _list_slots(blocks: Blocks, tier: int, out: Words) -> int:
    """Write the slots of all blocks held in a tier to `out`. Returns their number."""
    bit = _1 << np.uint64(tier)
    count = _list_table(blocks, PRESENT, bit, out, 0)
    if blocks.header[MOVED] != ALL:
        count = _list_table(blocks, FORMER, bit, out, count)
    return count


@kernel(f"void(int64, int64, {_OUT})")
def list_held(address: int, tier: int, out: Words) -> None:
    """Write all blocks held in a tier, unordered; `out` has room for exactly these."""
    blocks = blocks_at(np.uint64(address))
    for i in range(_list_slots(blocks, tier, out)):
        out[i] = blocks.memory[out[i] + KEY]


@kernel(f"void(int64, int64, {_OUT})")
def list_paths(address: int, tier: int, out: Words) -> None:
    """Write all blocks held in a tier with their parents, unordered.

    `out` has three parts of equal length: hashes, parents, and 1 where there is a parent.
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
    """Write the keys that are not held in a tier to `out`. Returns their number."""
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
    """Finish the move out of the former table, then make the present table the former one."""
    begin_to_move(blocks_at(np.uint64(address)))
