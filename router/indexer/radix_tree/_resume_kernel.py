"""Where prompts can be resumed on ranks of hybrid models: the engine's rule, for all ranks at once.

A prefix that full attention holds can be resumed at t only if each class holds the blocks that it
needs before t (`router.protocol.hybrid`): a window its last blocks, a state one, a chunk those
since its begin. The result is the largest such t that is aligned and leaves a token to compute.

Blocks of classes are in a second tree, with a bit of the mask for each class in place of a tier.

    position   1 …  6  7  8  9  10 … limit of a row: where its full attention ends, cut to aligned
    held            ▪  ▪     ▪                     │
               ◀──────────────── walk ─────────────┘
    a run of the needed length ends at 7: the row is done; at 9 the run was too short

Without EAGLE and chunks one walk down serves all rows. A row either waits, or runs from a position
t on at which all its classes stand; a missing block that t needs also rules out every t between, so
that the row waits again. Most positions hold nothing, or the same set as their neighbour, and cost
one look-up. The other layouts follow the engine's procedure (`_stepwise_kernel.py`).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.indexer.radix_tree._block_table import AHEAD, Words, fetch, look_up
from router.indexer.radix_tree._holder_sets import (
    CLASS_HOLDER,
    CLASS_TREE,
    ENDS_COLUMNS,
    LAYOUT,
    MASK,
    MASK_BITS,
    MAX_HOLDERS,
    SCRATCH,
    VISIBLE,
    Tree,
    member_at,
    of_holder,
    size_of,
    tree_at,
)
from router.indexer.radix_tree._stepwise_kernel import (
    ALIGNMENT,
    CLASS_WORDS,
    CLASSES,
    FIRST_CLASS,
    IS_STEPWISE,
    KIND,
    LAYOUT_WORDS,
    SIZE,
    SPAN,
    WINDOW,
    cut_stepwise,
    references_of,
    write_end,
)
from router.indexer.radix_tree._tree_kernel import find
from router.runtime.kernels.numba_runtime import device, kernel, words_at

Ints = npt.NDArray[np.int64]

# Columns of a row of the walk. END: where its run began; 0 while it waits, -1 when it is done.
ROW, HOLDER, LIMIT, SHAPE, END, LOW, SERIAL, BITS = 0, 1, 2, 3, 4, 5, 6, 7
ROW_COLUMNS = 8
"""Columns of a row: its row in the ends, its holder in the second tree, its first and lowest
positions, and the classes that hold the block at the position numbered `SERIAL`."""

# Columns of a shape, in blocks; then the size and the reach below the end of each class.
STEP, ALL, COUNT, LOWEST = 0, 1, 2, 3
FIRST_SIZE = 4
SHAPE_COLUMNS = FIRST_SIZE + 8

_0 = np.uint64(0)
_1 = np.uint64(1)
_NOWHERE = np.uint64(2**64 - 1)


class Walk(NamedTuple):
    """The rows of a walk; those that run; and whether a row's limit is at a position.

    `row_of`: the row of a holder, valid only if that row names it.
    """

    rows: Ints
    shapes: Ints
    running: Ints
    row_of: Words
    is_limit: npt.NDArray[np.uint8]


@device
def cut_to_resumable(tree: Tree, rows: int, keys: Words, isl_tokens: int, block_size: int) -> None:
    """Shorten the ends of the rows that belong to hybrid ranks, in all tiers alike.

    `isl_tokens`: the prompt's length, at most one block more than the keys name.
    """
    classes = tree_at(int(tree.state[CLASS_TREE]))
    room = classes.state[MAX_HOLDERS]
    walk = Walk(
        np.empty((rows, ROW_COLUMNS), np.int64),
        np.empty((rows, SHAPE_COLUMNS), np.int64),
        np.empty(rows, np.int64),
        words_at(classes.state[SCRATCH] + room * np.uint64(32), room),
        np.zeros(len(keys) + 1, np.uint8),
    )
    most = max(isl_tokens - 1, 0) // block_size
    count, shapes, last_layout, are_stepwise = 0, 0, _0, False
    for row in range(rows):
        holder = np.uint64(tree.ends[row * ENDS_COLUMNS])
        address = tree.holders[of_holder(holder, LAYOUT)]
        if address == _0:
            continue
        layout = words_at(address, np.uint64(LAYOUT_WORDS))
        if layout[IS_STEPWISE]:
            are_stepwise = True
            continue
        if address != last_layout:
            last_layout = address
            _derive(layout, block_size, walk.shapes, shapes)
            shapes += 1
        limit = min(int(tree.ends[row * ENDS_COLUMNS + 1]), most)
        count = _open_row(tree, walk, count, row, shapes - 1, limit)
    if count:
        _walk(classes, walk, count, shapes, keys)
    for n in range(count):
        write_end(tree, walk.rows[n, ROW], abs(walk.rows[n, END]))
    if are_stepwise:
        cut_stepwise(tree, classes, rows, references_of(classes, keys), isl_tokens, block_size)


@device
def _derive(layout: Words, block_size: int, shapes: Ints, s: int) -> None:
    """Write a layout's shape: sizes in blocks. STEP is 0 if they are not multiples of blocks."""
    step, count, lowest = int(layout[ALIGNMENT]), int(layout[CLASSES]), 0
    step = step // block_size if step % block_size == 0 else 0
    for c in range(count):
        first = FIRST_CLASS + c * CLASS_WORDS
        size, needed = int(layout[first + SIZE]), 1
        if layout[first + KIND] == np.uint64(WINDOW):
            needed = -(-(int(layout[first + SPAN]) - 1) // size)
        if size % block_size:
            step = 0
        reach = (needed - 1) * (size // block_size)
        shapes[s, FIRST_SIZE + 2 * c] = size // block_size
        shapes[s, FIRST_SIZE + 2 * c + 1] = reach
        lowest = max(lowest, reach)
    shapes[s, STEP], shapes[s, COUNT] = step, count
    shapes[s, ALL], shapes[s, LOWEST] = (1 << count) - 1, lowest


@device
def _open_row(tree: Tree, walk: Walk, count: int, row: int, shape: int, limit: int) -> int:
    """Add a row to the walk, unless its result is known. Returns their number."""
    holder = np.uint64(tree.ends[row * ENDS_COLUMNS])
    held_by = int(tree.holders[of_holder(holder, CLASS_HOLDER)]) - 1
    step, needs = int(walk.shapes[shape, STEP]), walk.shapes[shape, ALL]
    limit = limit - limit % step if step else 0
    if limit == 0 or needs == 0 or held_by < 0:
        write_end(tree, row, 0 if needs else limit)
        return count
    walk.rows[count, ROW] = row
    walk.rows[count, HOLDER] = held_by
    walk.rows[count, LIMIT] = limit
    walk.rows[count, SHAPE] = shape
    walk.rows[count, END] = 0
    walk.rows[count, SERIAL] = 0
    walk.row_of[held_by] = np.uint64(count)
    walk.is_limit[limit] = 1
    return count + 1


@device
def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


@device
def _strides(walk: Walk, shapes: int) -> tuple[int, int, bool]:
    """Return the distances of positions with blocks, and of ends; and if all are the same one."""
    stride, end_stride, is_uniform = 0, 0, True
    for s in range(shapes):
        end_stride = _gcd(walk.shapes[s, STEP], end_stride)
        for c in range(walk.shapes[s, COUNT]):
            stride = _gcd(walk.shapes[s, FIRST_SIZE + 2 * c], stride)
    for s in range(shapes):
        is_uniform &= walk.shapes[s, STEP] == stride
        for c in range(walk.shapes[s, COUNT]):
            is_uniform &= walk.shapes[s, FIRST_SIZE + 2 * c] == stride
    return stride, end_stride, is_uniform


@device
def _walk(classes: Tree, walk: Walk, count: int, shapes: int, keys: Words) -> None:
    """Find the ends of all rows. Afterwards END is a row's end, or its negative; or 0."""
    stride, end_stride, is_uniform = _strides(walk, shapes)
    position = 0
    for n in range(count):
        position = max(position, int(walk.rows[n, LIMIT]))
    left, running, soonest, serial, last = count, 0, 0, 0, _NOWHERE
    while position > 0 and left > 0:
        ahead = position - AHEAD * stride
        if ahead > 0:
            fetch(classes.blocks, keys[ahead - 1])
        reference = look_up(classes.blocks, keys[position - 1])
        if reference == _0 and (is_uniform or running == 0):
            running = _stop_all(walk, running)
        elif not is_uniform or reference != last or walk.is_limit[position]:
            serial += 1
            started = _note_members(classes, walk, count, running, reference, position, serial)
            running, soonest = _keep_running(walk, running, started, position, serial)
        last = reference
        if running and position <= soonest:
            running, soonest, left = _complete(walk, running, position, left)
        position -= stride
        if running == 0:
            position -= position % end_stride


@device
def _stop_all(walk: Walk, running: int) -> int:
    for i in range(running):
        walk.rows[walk.running[i], END] = 0
    return 0


@device
def _note_members(
    classes: Tree,
    walk: Walk,
    count: int,
    running: int,
    reference: np.uint64,
    position: int,
    serial: int,
) -> int:
    """Note the classes of each row here, and start those that may run. Returns how many run."""
    for i in range(size_of(classes, reference)):
        word = member_at(classes, reference, np.uint64(i))
        holder = word >> MASK_BITS
        n = int(walk.row_of[holder])
        if n >= count or walk.rows[n, HOLDER] != int(holder):
            continue
        bits = int(word & MASK & classes.holders[of_holder(holder, VISIBLE)])
        walk.rows[n, SERIAL], walk.rows[n, BITS] = serial, bits
        if walk.rows[n, END] == 0 and position <= walk.rows[n, LIMIT]:
            shape = walk.rows[n, SHAPE]
            needs = walk.shapes[shape, ALL]
            if bits & needs == needs and position % walk.shapes[shape, STEP] == 0:
                walk.rows[n, END] = position
                walk.rows[n, LOW] = position - walk.shapes[shape, LOWEST]
                walk.running[running] = n
                running += 1
    return running


@device
def _keep_running(
    walk: Walk, before: int, running: int, position: int, serial: int
) -> tuple[int, int]:
    """Keep the rows that lack no block they need. Returns how many, and the highest LOW."""
    kept, soonest = 0, 0
    for i in range(running):
        n = walk.running[i]
        if i < before and _lacks(walk, n, position, serial):
            walk.rows[n, END] = 0
            continue
        walk.running[kept] = n
        kept += 1
        soonest = max(soonest, walk.rows[n, LOW])
    return kept, soonest


@device
def _lacks(walk: Walk, n: int, position: int, serial: int) -> bool:
    """Return whether a block at this position is missing that the row needs."""
    shape = walk.rows[n, SHAPE]
    bits = walk.rows[n, BITS] if walk.rows[n, SERIAL] == serial else 0
    if bits & walk.shapes[shape, ALL] == walk.shapes[shape, ALL]:
        return False
    for c in range(walk.shapes[shape, COUNT]):
        size, reach = (
            walk.shapes[shape, FIRST_SIZE + 2 * c],
            walk.shapes[shape, FIRST_SIZE + 2 * c + 1],
        )
        is_needed = position >= walk.rows[n, END] - reach and position % size == 0
        if is_needed and not bits >> c & 1:
            return True
    return False


@device
def _complete(walk: Walk, running: int, position: int, left: int) -> tuple[int, int, int]:
    """End the rows that need nothing below. Returns how many run, the highest LOW, those left."""
    kept, soonest = 0, 0
    for i in range(running):
        n = walk.running[i]
        if position <= walk.rows[n, LOW]:
            walk.rows[n, END] = -walk.rows[n, END]
            left -= 1
            continue
        walk.running[kept] = n
        kept += 1
        soonest = max(soonest, walk.rows[n, LOW])
    return kept, soonest, left


@kernel("int64(int64, Array(uint64, 1, 'C', readonly=True), int64, int64)")
def find_resumable(address: int, keys: Words, isl_tokens: int, block_size: int) -> int:
    """Write the rows of `find` with resumable blocks in place of overlaps; return their number.

    Differs from `find` for ranks of hybrid models only.
    """
    rows = find(address, keys)
    tree = tree_at(address)
    if tree.state[CLASS_TREE] != _0:
        cut_to_resumable(tree, rows, keys, isl_tokens, block_size)
    return rows
