"""The longest held prefix of a prompt, for all holders at once.

Rows of the result: {holder, end of its overlap in each cumulative tier}, one for each holder of the
first block. `level` of a row is the slowest tier it has needed so far: when a position raises it
from a to b, the overlaps of the tiers a to b - 1 end there; at 4 the row ends.

    position   0        walk while a row may have holes        gallop         last
               ├────────┼────────┼─ … ─┼─────────────────────────┼─ halve, halve, … ─┤

Where all rows are free of holes, the set of a block's holders only shrinks along the prompt: if two
positions have equal holders, so have all positions between them, and bisection finds the ends.
Otherwise every position is examined.

Mostly one holder leaves at a time. Then the difference of the two sets' profiles is this holder's
part of them, and its row is found among the parts of all matching rows, without reading the sets.
If several leave, the two sets are compared, member by member; if many, all members are read.
"""

from typing import NamedTuple

import numpy as np

from router.indexer.radix_tree._block_table import (
    MISSING,
    Halves,
    Words,
    fetch_ahead,
    fetch_first,
    look_up,
)
from router.indexer.radix_tree._holder_sets import (
    CLOSED,
    ENDS_COLUMNS,
    MASK,
    MASK_BITS,
    MATCHING,
    MAX_HOLDERS,
    OPEN,
    ROWS,
    SCRATCH,
    SERIAL,
    VISIBLE,
    Tree,
    fastest,
    member_at,
    of_holder,
    profile_of,
    profile_part,
    size_of,
)
from router.runtime.kernels.numba_runtime import device, words_at

LOOK_UPS = np.uint64(72)
"""Capacity for look-ups: more than the number of times a prompt can be halved."""

WIDTH = np.uint64(ENDS_COLUMNS)

MANY = np.uint64(8)
"""Of more holders that leave at one position, each is not looked for."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_4 = np.uint64(4)


class Rows(NamedTuple):
    """The result under construction: each row's level, member word here, and serial of that entry.

    `matching`: the rows still matching. `parts`: their parts of the profile. `row_of`: the row of a
    holder, valid only if `ends` names that holder in that row. The state counts all rows, the
    matching ones, and the matching ones that may have holes. `targets`, `references`: positions
    looked up and the references found.
    """

    ends: Halves
    level: Words
    word: Words
    noted: Words
    matching: Words
    parts: Words
    row_of: Words
    targets: Words
    references: Words


@device
def _rows_at(tree: Tree) -> Rows:
    room = tree.state[MAX_HOLDERS]
    start, step = tree.state[SCRATCH], room * np.uint64(8)
    return Rows(
        tree.ends,
        words_at(start, room),
        words_at(start + step, room),
        words_at(start + step * np.uint64(2), room),
        words_at(start + step * np.uint64(3), room),
        words_at(start + step * np.uint64(4), room),
        words_at(start + step * np.uint64(5), room),
        words_at(start + step * np.uint64(6), LOOK_UPS),
        words_at(start + step * np.uint64(6) + LOOK_UPS * np.uint64(8), LOOK_UPS),
    )


@device
def match(tree: Tree, keys: Words, walk_all: bool) -> int:
    """Write the rows to `tree.ends`, one after the other. Returns their number."""
    tree.state[ROWS] = tree.state[MATCHING] = tree.state[OPEN] = _0
    if len(keys) == 0:
        return 0
    rows = _rows_at(tree)
    reference = look_up(tree.blocks, keys[0])
    _open_rows(tree, rows, reference, len(keys), walk_all)
    position, reference = _walk(tree, rows, keys, reference, walk_all)
    if tree.state[MATCHING] and position + 1 < len(keys):
        _gallop(tree, rows, keys, position, reference)
    return int(tree.state[ROWS])


@device
def _open_rows(tree: Tree, rows: Rows, first: np.uint64, length: int, walk_all: bool) -> None:
    for i in range(size_of(tree, first)):
        word = member_at(tree, first, np.uint64(i))
        holder, level = word >> MASK_BITS, _tier_seen(tree, word)
        if level == _4:
            continue
        row = tree.state[ROWS]
        rows.ends[row * WIDTH] = np.uint32(holder)
        for tier in range(_4):
            rows.ends[row * WIDTH + _1 + tier] = np.uint32(length if tier >= level else 0)
        rows.level[row] = level
        rows.noted[row] = _0
        rows.matching[row] = row
        rows.row_of[holder] = row
        tree.state[ROWS] += _1
        tree.state[MATCHING] += _1
        if walk_all or _may_have_holes(tree, holder, level):
            tree.state[OPEN] += _1


@device
def _tier_seen(tree: Tree, word: np.uint64) -> np.uint64:
    """Return the fastest tier that matching sees; 4 if there is none."""
    return fastest(word & tree.holders[of_holder(word >> MASK_BITS, VISIBLE)])


@device
def _may_have_holes(tree: Tree, holder: np.uint64, level: np.uint64) -> bool:
    return (tree.holders[of_holder(holder, CLOSED)] | ~(MASK << level)) & MASK != MASK


@device
def _walk(
    tree: Tree, rows: Rows, keys: Words, reference: np.uint64, walk_all: bool
) -> tuple[int, np.uint64]:
    """Examine positions one by one. Returns the last one examined and the reference there."""
    position = 0
    fetch_first(tree.blocks, keys)
    while tree.state[OPEN] and position + 1 < len(keys):
        position += 1
        fetch_ahead(tree.blocks, keys, position)
        found = look_up(tree.blocks, keys[position])
        if found != reference:
            reference = found
            _settle(tree, rows, reference, position, walk_all)
    return position, reference


@device
def _gallop(tree: Tree, rows: Rows, keys: Words, start: int, reference: np.uint64) -> None:
    """Find the ends behind a position by bisection: the nearest known target is the last one."""
    here, profile, known, are_parts_known = np.uint64(start), profile_of(tree, reference), 1, False
    rows.targets[0] = np.uint64(len(keys) - 1)
    rows.references[0] = look_up(tree.blocks, keys[len(keys) - 1])
    while known and tree.state[MATCHING]:
        target, ahead = rows.targets[known - 1], rows.references[known - 1]
        there = profile_of(tree, ahead)
        if there == profile:
            here, reference, known = target, ahead, known - 1
        elif target == here + _1:
            if not (are_parts_known and _end_rows(tree, rows, reference, ahead, int(target))):
                _settle(tree, rows, ahead, int(target), False)
                _note_parts(tree, rows)
                are_parts_known = True
            here, reference, profile, known = target, ahead, there, known - 1
        else:
            middle = (here + target) >> _1
            rows.targets[known] = middle
            rows.references[known] = look_up(tree.blocks, keys[middle])
            known += 1


@device
def _end_rows(tree: Tree, rows: Rows, before: np.uint64, after: np.uint64, position: int) -> bool:
    """End the rows of holders that leave here.

    Returns False if that is not all that changes, or if many leave: to read all members is faster.
    """
    if size_of(tree, before) > size_of(tree, after) + MANY:
        return False
    if _end_one(tree, rows, profile_of(tree, before) ^ profile_of(tree, after), position):
        return True
    kept, size = _0, size_of(tree, after)
    for i in range(size_of(tree, before)):
        word = member_at(tree, before, np.uint64(i))
        found = member_at(tree, after, kept) if kept < size else MISSING
        if found >> MASK_BITS > word >> MASK_BITS:
            _end_one(tree, rows, profile_part(word), position)
        elif found == word or profile_part(found) == profile_part(word):
            kept += _1
    return kept == size


@device
def _end_one(tree: Tree, rows: Rows, part: np.uint64, position: int) -> bool:
    """End the row with this part of the profile. Returns False if there is none."""
    for i in range(tree.state[MATCHING]):
        if rows.parts[i] == part:
            _raise_level(tree, rows, rows.matching[i], _4, position, False)
            tree.state[MATCHING] -= _1
            last = tree.state[MATCHING]
            rows.matching[i], rows.parts[i] = rows.matching[last], rows.parts[last]
            return True
    return False


@device
def _note_parts(tree: Tree, rows: Rows) -> None:
    for i in range(tree.state[MATCHING]):
        rows.parts[i] = profile_part(rows.word[rows.matching[i]])


@device
def _settle(tree: Tree, rows: Rows, reference: np.uint64, position: int, walk_all: bool) -> None:
    """Raise the level of each row that needs a slower tier here, or that ends here."""
    _note_words(tree, rows, reference)
    serial = tree.state[SERIAL]
    kept = 0
    for i in range(tree.state[MATCHING]):
        row = rows.matching[i]
        level, tier = rows.level[row], _4
        if rows.noted[row] == serial:
            tier = _tier_seen(tree, rows.word[row])
        if tier > level:
            _raise_level(tree, rows, row, tier, position, walk_all)
        if tier != _4:
            rows.matching[kept] = row
            kept += 1
    tree.state[MATCHING] = np.uint64(kept)


@device
def _note_words(tree: Tree, rows: Rows, reference: np.uint64) -> None:
    tree.state[SERIAL] += _1
    for i in range(size_of(tree, reference)):
        word = member_at(tree, reference, np.uint64(i))
        holder = word >> MASK_BITS
        row = rows.row_of[holder]
        if row < tree.state[ROWS] and rows.ends[row * WIDTH] == holder:
            rows.word[row] = word
            rows.noted[row] = tree.state[SERIAL]


@device
def _raise_level(
    tree: Tree, rows: Rows, row: np.uint64, tier: np.uint64, position: int, walk_all: bool
) -> None:
    holder, level = np.uint64(rows.ends[row * WIDTH]), rows.level[row]
    for cumulative in range(level, tier):
        rows.ends[row * WIDTH + _1 + cumulative] = np.uint32(position)
    rows.level[row] = tier
    was_open = walk_all or _may_have_holes(tree, holder, level)
    is_open = tier != _4 and (walk_all or _may_have_holes(tree, holder, tier))
    if was_open and not is_open:
        tree.state[OPEN] -= _1
