"""Where prompts can be resumed on ranks of hybrid models: the engine's rule, for all ranks at once.

A prefix that full attention holds can be resumed at t only if each class holds the blocks that it
needs before t (`router.protocol.hybrid`): a window its last blocks, a state one, a chunk those
since its begin. The result is the largest such t that is aligned and leaves a token to compute.

Blocks of classes are in a second tree, with a bit of the mask for each class in place of a tier.

    position   1 …  6  7  8  9  10 … limit of a row: where its full attention ends, cut to aligned
    held            ▪  ▪     ▪                     │
               ◀──────────────── walk ─────────────┘
    a run of the needed length ends at 7: the row is done; at 9 the run was too short

One walk down serves all rows of a layout (`_walk_kernel.py`). With EAGLE the engine finds one block
more and drops it: full attention ends a block earlier; a window is sought that is a block longer,
from a block higher on. For layouts where that is not the same as the engine's procedure, it is
followed, one row at a time (`_stepwise_kernel.py`).
"""

import numpy as np

from router.indexer.radix_tree._block_table import Words
from router.indexer.radix_tree._holder_sets import (
    CLASS_HOLDER,
    CLASS_TREE,
    ENDS_COLUMNS,
    LAYOUT,
    VISIBLE,
    Tree,
    of_holder,
    tree_at,
)
from router.indexer.radix_tree._stepwise_kernel import (
    ALIGNMENT,
    CHUNK,
    CLASS_TOKENS,
    CLASS_WORDS,
    CLASSES,
    FIRST_CLASS,
    FULL_SIZE,
    IS_EAGLE,
    IS_FULL_EAGLE,
    IS_STEPWISE,
    KIND,
    LAYOUT_WORDS,
    SPAN,
    WINDOW,
    cut_stepwise,
    number_at,
    references_of,
    write_end,
)
from router.indexer.radix_tree._tree_kernel import find
from router.indexer.radix_tree._walk_kernel import (
    BLOCKS,
    REACH,
    Ints,
    Shape,
    Walk,
    add_row,
    floor_to,
    memory_words,
    walk_at,
    walk_down,
)
from router.protocol.hybrid import MAX_CLASSES
from router.runtime.kernels.numba_runtime import device, int_rows_at, kernel, words_at

_0 = np.uint64(0)
_1 = np.uint64(1)
_6 = np.uint64(6)
_63 = np.uint64(63)


@device
def cut_to_resumable(tree: Tree, rows: int, keys: Words, isl_tokens: int, block_size: int) -> None:
    """Shorten the ends of the rows that belong to hybrid ranks, in all tiers alike.

    `isl_tokens`: the prompt's length, at most one block more than the keys name. One walk for each
    layout among the rows.
    """
    classes = tree_at(int(tree.state[CLASS_TREE]))
    layouts, holders, are_stepwise = np.empty(rows, np.uint64), _0, False
    for row in range(rows):
        holder = np.uint64(tree.ends[row * ENDS_COLUMNS])
        layouts[row] = tree.holders[of_holder(holder, LAYOUT)]
        if layouts[row]:
            holders = max(holders, tree.holders[of_holder(holder, CLASS_HOLDER)])
    words = int(np.int64((holders + _63) >> _6))
    memory = np.empty(2 * MAX_CLASSES + memory_words(words, len(keys)), np.uint64)
    address = int(memory.ctypes.data)
    for row in range(rows):
        if layouts[row] == _0:
            continue
        layout = words_at(layouts[row], np.uint64(LAYOUT_WORDS))
        if layout[IS_STEPWISE]:
            are_stepwise = True
        else:
            shape = _shape(layout, block_size, int_rows_at(address, number_at(layout, CLASSES), 2))
            walk = walk_at(address + 16 * MAX_CLASSES, shape, words, len(keys))
            _cut_rows(tree, classes, walk, shape, layouts, row, keys, isl_tokens, block_size)
    memory[0] = _0  # it is not freed before
    if are_stepwise:
        cut_stepwise(tree, classes, rows, references_of(classes, keys), isl_tokens, block_size)


@device
def _cut_rows(
    tree: Tree,
    classes: Tree,
    walk: Walk,
    shape: Shape,
    layouts: Words,
    first: int,
    keys: Words,
    isl_tokens: int,
    block_size: int,
) -> None:
    """Shorten the ends of the rows with the layout of the first, and take it out of `layouts`."""
    address, most = layouts[first], min(isl_tokens // block_size, len(keys))
    top, count = 0, 0
    for row in range(first, len(layouts)):
        if layouts[row] == address:
            layouts[row] = _0
            limit = _full_end(tree, shape, row, isl_tokens, block_size)
            highest = _open_row(tree, classes, walk, shape, row, limit, most)
            top, count = max(top, highest), count + (1 if highest else 0)
    walk_down(tree, classes, walk, shape, keys, top, count)


@device
def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


@device
def _shape(layout: Words, block_size: int, classes: Ints) -> Shape:
    """Return a layout in blocks, with its classes written to an array of theirs.

    The step is 0 if its sizes are not multiples of blocks.
    """
    step, full = number_at(layout, ALIGNMENT), number_at(layout, FULL_SIZE)
    are_whole = step % block_size == 0 and full % block_size == 0
    step, full = step // block_size, full // block_size
    stride, span, dropped = step, 0, 0
    for c in range(len(classes)):
        first = FIRST_CLASS + c * CLASS_WORDS
        tokens, needed = number_at(layout, first + CLASS_TOKENS), 1
        size = tokens // block_size
        are_whole &= tokens % block_size == 0
        if layout[first + KIND] == np.uint64(WINDOW):
            needed = -(-(number_at(layout, first + SPAN) - 1) // tokens)
            if layout[first + IS_EAGLE]:
                needed, dropped = needed + 1, size
        elif layout[first + KIND] == np.uint64(CHUNK):
            span = number_at(layout, first + SPAN) // block_size
        classes[c, BLOCKS], classes[c, REACH] = size, (needed - 1) * size
        stride = _gcd(stride, size)
    full_dropped = full if layout[IS_FULL_EAGLE] else 0
    return Shape(step if are_whole else 0, stride, span, full, full_dropped, dropped, classes)


@device
def _full_end(tree: Tree, shape: Shape, row: int, isl_tokens: int, block_size: int) -> int:
    """Return the longest aligned length that full attention accepts on a row's rank."""
    if shape.step == 0:
        return 0
    looks_further = shape.full_dropped > 0 and len(shape.classes) > 0
    most = (isl_tokens if looks_further else max(isl_tokens - 1, 0)) // block_size
    end = min(int(np.int64(tree.ends[row * ENDS_COLUMNS + 1])), most)
    return floor_to(shape.step, max(floor_to(shape.full, end) - shape.full_dropped, 0))


@device
def _open_row(
    tree: Tree, classes: Tree, walk: Walk, shape: Shape, row: int, limit: int, most: int
) -> int:
    """Write what can be resumed without any block of a class, and add the row to the walk.

    `limit`: the end of full attention. `most`: the blocks of the prompt. Returns the highest
    position that the row is sought at; 0 if the result is known.
    """
    count = len(shape.classes)
    known = limit - limit % shape.span if shape.span else 0
    write_end(tree, row, known if count else limit)
    holder = np.uint64(tree.ends[row * ENDS_COLUMNS])
    held_by = tree.holders[of_holder(holder, CLASS_HOLDER)]
    if limit == 0 or count == 0 or held_by == _0:
        return 0
    needs = np.uint64((1 << count) - 1)
    if classes.holders[of_holder(held_by - _1, VISIBLE)] & needs != needs:
        return 0
    highest = min(limit + shape.dropped, floor_to(shape.step, most))
    add_row(walk, int(np.int64(held_by - _1)), row, highest)
    return highest


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
