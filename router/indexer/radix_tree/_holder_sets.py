"""The holders of a block: a reference of one word, to one holder or to an interned set of several.

    one holder:  │ 0 │ holder id …  │ tier mask (4 bits) │        the member word itself
    several:     │ 1 │ set id …                          │

A set is a list of member words in the order of holder ids. Equal sets have one id: they are found
by the XOR of the mixes of their members, which is updated in O(1) when one member changes, so that
the common step "the same set, and this holder too" takes one look-up and copies nothing. A set
lives while slots refer to it.

Invariants: no mask is 0; a set has at least two members; `USES` is the number of slots referring
to it. Two sets of equal mix are taken to be equal, as two blocks of equal hash are (2^-64 a pair).
"""

from typing import NamedTuple

import numpy as np

from router.indexer.radix_tree._block_table import (
    HEADER_WORDS,
    MAX_COUNT,
    MISSING,
    Halves,
    Table,
    Words,
    erase,
    look_up,
    mixed_of,
    place,
    seek,
    sub_table_of,
    table_at,
)
from router.runtime.kernels.numba_runtime import device, halves_at, words_at
from router.sequence.hashing._digest import mix

MASK_BITS = np.uint64(4)
MASK = np.uint64(15)
SET = np.uint64(1 << 63)
SEVERAL = np.uint64(63)

# Columns of a holder.
COUNTS = np.uint64(0)
DIGESTS = np.uint64(4)
VISIBLE = np.uint64(8)
KEEP = np.uint64(9)
CLOSED = np.uint64(10)
FORCED_OPEN = np.uint64(11)
LEFT_OVER = np.uint64(12)
CLASS_HOLDER = np.uint64(13)
LAYOUT = np.uint64(14)
HOLDER_COLUMNS = 16
"""Columns per holder. `COUNTS` and `DIGESTS`: one per tier. `VISIBLE`, `KEEP`, `CLOSED`: masks of
the tiers that matching sees, that a sweep keeps, and of the cumulative tiers free of holes.
`FORCED_OPEN`: a report of no holes was found to be wrong. `LEFT_OVER`: number of blocks, counted
once per tier, that a sweep still has to remove. Of hybrid ranks: `CLASS_HOLDER`: the rank's holder
in the tree of classes, plus 1; 0 if there is none. `LAYOUT`: address of its layout's words; 0: the
rank is not hybrid."""

ENDS_COLUMNS = 5
"""Columns of a result row: the holder, then the end of its overlap in each cumulative tier."""

# Columns of a set.
MIX = np.uint64(0)
PROFILE = np.uint64(1)
START = np.uint64(2)
SIZE = np.uint64(3)
USES = np.uint64(4)
ROOM = np.uint64(5)
SET_COLUMNS = 6
"""Columns per set. `MIX`, `PROFILE`: XOR of the mixes of the members, and of their fastest tiers
alone. `START`, `SIZE`: position of the members, in a stretch of 2^`ROOM` words. `USES`: number of
slots that refer to the set."""

# Words of the state, after the headers of the two tables.
BLOCK_TABLE = 0
SET_TABLE = HEADER_WORDS
HOLDERS = np.uint64(2 * HEADER_WORDS)
SETS = np.uint64(2 * HEADER_WORDS + 1)
MEMBERS = np.uint64(2 * HEADER_WORDS + 2)
MAX_HOLDERS = np.uint64(2 * HEADER_WORDS + 3)
MAX_MEMBERS = np.uint64(2 * HEADER_WORDS + 4)
NEXT_SET = np.uint64(2 * HEADER_WORDS + 5)
NEXT_MEMBER = np.uint64(2 * HEADER_WORDS + 6)
FREE_SET = np.uint64(2 * HEADER_WORDS + 7)
SCRATCH = np.uint64(2 * HEADER_WORDS + 8)
SERIAL = np.uint64(2 * HEADER_WORDS + 9)
ENDS = np.uint64(2 * HEADER_WORDS + 10)
UNTIL_CHECK = np.uint64(2 * HEADER_WORDS + 11)
CHECK_INTERVAL = np.uint64(2 * HEADER_WORDS + 12)
CHECKED = np.uint64(2 * HEADER_WORDS + 13)
DIFFERED = np.uint64(2 * HEADER_WORDS + 14)
ROWS = np.uint64(2 * HEADER_WORDS + 15)
MATCHING = np.uint64(2 * HEADER_WORDS + 16)
OPEN = np.uint64(2 * HEADER_WORDS + 17)
CLASS_TREE = np.uint64(2 * HEADER_WORDS + 18)
FREE_MEMBERS = np.uint64(2 * HEADER_WORDS + 19)
STATE_WORDS = 2 * HEADER_WORDS + 19 + 32
"""Words of the state. `CLASS_TREE`: address of the state of the tree with the blocks of hybrid
ranks' classes (`class_plane.py`); 0 while no rank is hybrid. Free sets, and free stretches of
members (one list per power of two), are linked lists that end with 0."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)


class Tree(NamedTuple):
    """The whole index as kernels see it."""

    state: Words
    blocks: Table
    set_table: Table
    holders: Words
    sets: Words
    members: Halves
    ends: Halves


@device
def tree_at(address: int) -> Tree:
    """Return the index that the state at an address describes."""
    start = np.uint64(address)
    state = words_at(start, np.uint64(STATE_WORDS))
    set_table = table_at(start + np.uint64(8 * SET_TABLE))
    return Tree(
        state,
        table_at(start + np.uint64(8 * BLOCK_TABLE)),
        set_table,
        words_at(state[HOLDERS], state[MAX_HOLDERS] * np.uint64(HOLDER_COLUMNS)),
        words_at(state[SETS], (set_table.header[MAX_COUNT] + _1) * np.uint64(SET_COLUMNS)),
        halves_at(state[MEMBERS], state[MAX_MEMBERS]),
        halves_at(state[ENDS], state[MAX_HOLDERS] * np.uint64(ENDS_COLUMNS)),
    )


@device
def fastest(mask: np.uint64) -> np.uint64:
    """Return the fastest tier of a mask; 4 if the mask is empty."""
    tier = _0
    while tier < np.uint64(4) and not (mask >> tier) & _1:
        tier += _1
    return tier


@device
def bits_in(mask: np.uint64) -> np.uint64:
    """Return the number of tiers in a mask."""
    return (mask & _1) + (mask >> _1 & _1) + (mask >> _2 & _1) + (mask >> np.uint64(3) & _1)


@device
def member_word(holder: np.uint64, mask: np.uint64) -> np.uint64:
    """Return the word of a holder and the tiers it holds a block in."""
    return holder << MASK_BITS | mask


@device
def column(row: np.uint64, name: np.uint64, columns: int) -> np.uint64:
    """Return the index of a column of a row."""
    return row * np.uint64(columns) + name


@device
def of_set(reference: np.uint64, name: np.uint64) -> np.uint64:
    """Return the index of a column of the set referred to."""
    return column(reference & ~SET, name, SET_COLUMNS)


@device
def of_holder(holder: np.uint64, name: np.uint64) -> np.uint64:
    """Return the index of a column of a holder."""
    return column(holder, name, HOLDER_COLUMNS)


@device
def size_of(tree: Tree, reference: np.uint64) -> np.uint64:
    """Return the number of holders referred to."""
    if reference >> SEVERAL:
        return tree.sets[of_set(reference, SIZE)]
    return _1 if reference else _0


@device
def uses_of(tree: Tree, reference: np.uint64) -> np.uint64:
    """Return the number of slots that refer to a set."""
    return tree.sets[of_set(reference, USES)]


@device
def member_at(tree: Tree, reference: np.uint64, i: np.uint64) -> np.uint64:
    """Return the i-th member word of a reference."""
    if reference >> SEVERAL:
        return np.uint64(tree.members[tree.sets[of_set(reference, START)] + i])
    return reference


@device
def profile_of(tree: Tree, reference: np.uint64) -> np.uint64:
    """Return a mix of the holders and their fastest tiers: equal where searches see no change."""
    if reference >> SEVERAL:
        return tree.sets[of_set(reference, PROFILE)]
    return profile_part(reference)


@device
def profile_part(word: np.uint64) -> np.uint64:
    """Return a member word's part of the profile of its set."""
    if word == _0:
        return _0
    return mix((word >> MASK_BITS) << MASK_BITS | fastest(word & MASK))


@device
def position_of(tree: Tree, reference: np.uint64, holder: np.uint64) -> np.uint64:
    """Return the position of the holder among the members, or the one where it belongs."""
    if not reference >> SEVERAL:
        return _1 if reference and reference >> MASK_BITS < holder else _0
    low, high = _0, size_of(tree, reference)
    while low < high:
        middle = (low + high) >> _1
        if member_at(tree, reference, middle) >> MASK_BITS < holder:
            low = middle + _1
        else:
            high = middle
    return low


@device
def word_of(tree: Tree, reference: np.uint64, position: np.uint64, holder: np.uint64) -> np.uint64:
    """Return the holder's member word at its position; 0 if it is no member."""
    if position < size_of(tree, reference):
        word = member_at(tree, reference, position)
        if word >> MASK_BITS == holder:
            return word
    return _0


@device
def with_member(
    tree: Tree, reference: np.uint64, position: np.uint64, old: np.uint64, new: np.uint64
) -> np.uint64:
    """Return a reference to the members with one replaced, added (`old` 0) or removed (`new` 0).

    The use counts of both references stay. Returns MISSING if there is no room for another set.
    """
    known = known_with_member(tree, reference, position, old, new)
    if known != MISSING:
        return known
    size = _size_with(tree, reference, old, new)
    return _create(tree, reference, position, old, new, size, _mix_with(tree, reference, old, new))


@device
def known_with_member(
    tree: Tree, reference: np.uint64, position: np.uint64, old: np.uint64, new: np.uint64
) -> np.uint64:
    """Return the result of `with_member` if it needs no new set, else MISSING."""
    size = _size_with(tree, reference, old, new)
    if size == _0:
        return _0
    if size == _1:
        if new != _0:
            return new
        return member_at(tree, reference, _1 if position == _0 else _0)
    known = look_up(tree.set_table, _mix_with(tree, reference, old, new))
    return SET | known if known else MISSING


@device
def alter(
    tree: Tree, reference: np.uint64, position: np.uint64, old: np.uint64, new: np.uint64
) -> bool:
    """Replace a member, or remove it (`new` is 0), for all slots that refer to the set.

    The altered set must not exist yet. Needs one free slot in the table of sets; returns False if
    there is none.
    """
    wanted = _mix_with(tree, reference, old, new)
    slot = place(tree.set_table, wanted)
    if slot == MISSING:
        return False
    tree.set_table.slots[slot + _1] = reference & ~SET
    _forget_mix(tree, reference)
    tree.sets[of_set(reference, MIX)] = wanted
    tree.sets[of_set(reference, PROFILE)] ^= profile_part(old) ^ profile_part(new)
    if new != _0:
        tree.members[tree.sets[of_set(reference, START)] + position] = np.uint32(new)
    else:
        _leave_out(tree, reference, position)
    return True


@device
def _leave_out(tree: Tree, reference: np.uint64, position: np.uint64) -> None:
    start, size = tree.sets[of_set(reference, START)], tree.sets[of_set(reference, SIZE)]
    for i in range(position + _1, size):
        tree.members[start + i - _1] = tree.members[start + i]
    tree.sets[of_set(reference, SIZE)] = size - _1


@device
def _size_with(tree: Tree, reference: np.uint64, old: np.uint64, new: np.uint64) -> np.uint64:
    size = size_of(tree, reference)
    if old == _0:
        size += _1
    if new == _0:
        size -= _1
    return size


@device
def _mix_with(tree: Tree, reference: np.uint64, old: np.uint64, new: np.uint64) -> np.uint64:
    return _mix_of(tree, reference) ^ _mix_part(old) ^ _mix_part(new)


@device
def _mix_of(tree: Tree, reference: np.uint64) -> np.uint64:
    if reference >> SEVERAL:
        return tree.sets[of_set(reference, MIX)]
    return _mix_part(reference)


@device
def _mix_part(word: np.uint64) -> np.uint64:
    return mix(word) if word else _0


@device
def _create(
    tree: Tree,
    reference: np.uint64,
    position: np.uint64,
    old: np.uint64,
    new: np.uint64,
    size: np.uint64,
    wanted: np.uint64,
) -> np.uint64:
    room = _room_for(size)
    start = _take_members(tree, room)
    if start == MISSING:
        return MISSING
    slot = place(tree.set_table, wanted)
    if slot == MISSING:
        _give_members(tree, start, room)
        return MISSING
    created = SET | _take_set(tree)
    tree.set_table.slots[slot + _1] = created & ~SET
    _copy_members(tree, reference, position, old, new, start)
    profile = profile_of(tree, reference) ^ profile_part(old) ^ profile_part(new)
    tree.sets[of_set(created, MIX)] = wanted
    tree.sets[of_set(created, PROFILE)] = profile
    tree.sets[of_set(created, START)] = start
    tree.sets[of_set(created, SIZE)] = size
    tree.sets[of_set(created, USES)] = _0
    tree.sets[of_set(created, ROOM)] = room
    return created


@device
def _copy_members(
    tree: Tree,
    reference: np.uint64,
    position: np.uint64,
    old: np.uint64,
    new: np.uint64,
    start: np.uint64,
) -> None:
    target = start
    for i in range(size_of(tree, reference) + _1):
        if i == position and new != _0:
            tree.members[target] = np.uint32(new)
            target += _1
        if i < size_of(tree, reference) and not (i == position and old != _0):
            tree.members[target] = np.uint32(member_at(tree, reference, np.uint64(i)))
            target += _1


@device
def exchange(tree: Tree, slot: np.uint64, old: np.uint64, new: np.uint64) -> bool:
    """Make a slot refer to other holders. Returns True if that freed the id of the old set."""
    tree.blocks.slots[slot + _1] = new
    if new >> SEVERAL:
        tree.sets[of_set(new, USES)] += _1
    if not old >> SEVERAL:
        return False
    tree.sets[of_set(old, USES)] -= _1
    if tree.sets[of_set(old, USES)]:
        return False
    _free_set(tree, old)
    return True


@device
def _free_set(tree: Tree, reference: np.uint64) -> None:
    _forget_mix(tree, reference)
    start, room = tree.sets[of_set(reference, START)], tree.sets[of_set(reference, ROOM)]
    _give_members(tree, start, room)
    tree.sets[of_set(reference, START)] = tree.state[FREE_SET]
    tree.sets[of_set(reference, SIZE)] = _0
    tree.state[FREE_SET] = reference & ~SET


@device
def _forget_mix(tree: Tree, reference: np.uint64) -> None:
    known = tree.sets[of_set(reference, MIX)]
    mixed = mixed_of(tree.set_table, known)
    sub = sub_table_of(tree.set_table, mixed)
    erase(tree.set_table, sub, seek(tree.set_table, sub, mixed))


@device
def _take_set(tree: Tree) -> np.uint64:
    free = tree.state[FREE_SET]
    if free:
        tree.state[FREE_SET] = tree.sets[of_set(free, START)]
        return free
    tree.state[NEXT_SET] += _1
    return tree.state[NEXT_SET]


@device
def _room_for(size: np.uint64) -> np.uint64:
    bits = _1
    while (_1 << bits) < size:
        bits += _1
    return bits


@device
def _take_members(tree: Tree, bits: np.uint64) -> np.uint64:
    """Return a stretch for 2^bits members. Returns MISSING if there is none."""
    free = tree.state[FREE_MEMBERS + bits]
    if free:
        tree.state[FREE_MEMBERS + bits] = np.uint64(tree.members[free])
        return free
    start = tree.state[NEXT_MEMBER]
    if start + (_1 << bits) > tree.state[MAX_MEMBERS]:
        return MISSING
    tree.state[NEXT_MEMBER] = start + (_1 << bits)
    return start


@device
def _give_members(tree: Tree, start: np.uint64, bits: np.uint64) -> None:
    tree.members[start] = np.uint32(tree.state[FREE_MEMBERS + bits])
    tree.state[FREE_MEMBERS + bits] = start
