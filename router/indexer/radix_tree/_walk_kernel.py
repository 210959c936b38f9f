"""One walk down a prompt that finds where each rank can be resumed; see `_resume_kernel.py`.

The ranks of one layout are bits of words, so that 64 of them take one step. A row waits, or runs
from a position t on at which all its classes stand; a missing block that t needs also rules out
every t between, so that the row waits again. A row is listed at the position where something is to
be done next: first at its limit, then below the lowest block that t needs, where it is done.
Nothing is examined at positions that hold the same blocks as their neighbour.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.indexer.radix_tree._block_table import AHEAD, Halves, Words, fetch, look_up
from router.indexer.radix_tree._holder_sets import (
    MASK_BITS,
    SEVERAL,
    SIZE,
    START,
    Tree,
    of_set,
)
from router.indexer.radix_tree._stepwise_kernel import write_end
from router.protocol.hybrid import MAX_CLASSES
from router.runtime.kernels.numba_runtime import (
    device,
    halves_at,
    int_rows_at,
    trailing_zeros,
    word_rows_at,
    words_at,
)

Ints = npt.NDArray[np.int64]

# Columns of a row of the walk.
ROW, END, LISTED, NEXT = 0, 1, 2, 3
ROW_COLUMNS = 4
"""Columns of a row, by its holder: its row of the result; where its run began, 0 while it waits, -1
before its limit; the position at which it is listed, and the next row there, plus 1."""

BLOCKS, REACH = 0, 1
"""Columns of a class: its block size, and how far the lowest block it needs is below the highest,
both in blocks of the prompt."""

_0 = np.uint64(0)
_1 = np.uint64(1)
_63 = np.uint64(63)
_WORD_BITS = MASK_BITS + np.uint64(6)
_NOWHERE = np.uint64(2**64 - 1)


class Shape(NamedTuple):
    """A layout, in blocks of the prompt.

    `step`: the distance of ends; `stride`: of positions with blocks. `span`: of the only class, if
    it is a chunk; else 0. `full`: the block size of full attention. `full_dropped`, `dropped`: the
    blocks that the engine drops of what it finds of full attention, and of the only class.
    """

    step: int
    stride: int
    span: int
    full: int
    full_dropped: int
    dropped: int
    classes: Ints


class Walk(NamedTuple):
    """The rows of a walk; word w of a set of rows has those of the holders from 64 w on.

    `first_at`: the first row that is listed at each position, plus 1. `held`: the rows that hold
    the block at the current position, by class. `needing`: those that run and need blocks below,
    by class. `waiting`: those that may start.
    """

    rows: Ints
    first_at: Halves
    held: Words
    needing: Words
    waiting: Words


@device
def floor_to(size: int, number: int) -> int:
    """Return the largest multiple of a size that is not above a number; mostly the size is 1."""
    return number if size == 1 else number - number % size


@device
def memory_words(words: int, blocks: int) -> int:
    """Return the size of a walk in words of memory: its rows are bits of `words` words."""
    return words * (64 * ROW_COLUMNS + 2 * MAX_CLASSES + 1) + blocks // 2 + 1


@device
def walk_at(address: int, shape: Shape, words: int, blocks: int) -> Walk:
    """Return a walk without rows, in this memory: arrays that numba counts take twice the time."""
    count, word_bytes = len(shape.classes), 8 * words
    rows = int_rows_at(address, 64 * words, ROW_COLUMNS)
    address += 64 * word_bytes * ROW_COLUMNS
    held = word_rows_at(address, count, words)
    needing = word_rows_at(address + count * word_bytes, count, words)
    waiting = words_at(np.uint64(address + 2 * count * word_bytes), np.uint64(words))
    address += (2 * count + 1) * word_bytes
    first_at = halves_at(np.uint64(address), np.uint64(blocks + 1))
    held[:] = needing[:] = _0
    waiting[:] = _0
    first_at[:] = np.uint32(0)
    return Walk(rows, first_at, held, needing, waiting)


@device
def add_row(walk: Walk, n: int, row: int, limit: int) -> None:
    """Add a holder of the second tree that can be resumed nowhere above its limit."""
    walk.rows[n, ROW], walk.rows[n, END] = row, -1
    _list(walk, n, limit)


@device
def walk_down(
    tree: Tree, classes: Tree, walk: Walk, shape: Shape, keys: Words, position: int, left: int
) -> None:
    """Write the ends of the rows that can be resumed; the others keep theirs.

    `position`: the highest limit. `left`: the number of rows.
    """
    running, last, is_uniform = 0, _0, shape.step == shape.stride
    while position > 0 and left > 0:
        ahead = position - AHEAD * shape.stride
        if ahead > 0:
            fetch(classes.blocks, keys[ahead - 1])
        joined, done = _visit_listed(tree, walk, shape, position)
        left, running = left - done, running - done
        reference = look_up(classes.blocks, keys[position - 1])
        reference = _read_held(classes, walk, shape, reference, last, position)
        if reference != last or joined or not is_uniform:
            running -= _stop_rows(walk, shape, position)
            if floor_to(shape.step, position) == position:
                started, done = _start_rows(tree, walk, shape, position)
                left, running = left - done, running + started
        last = reference
        position -= shape.stride
        if running == 0:
            position = floor_to(shape.step, position)
    if running:
        _end_running(tree, walk, shape)


@device
def _list(walk: Walk, n: int, position: int) -> None:
    walk.rows[n, LISTED], walk.rows[n, NEXT] = position, walk.first_at[position]
    walk.first_at[position] = np.uint32(n + 1)


@device
def _visit_listed(tree: Tree, walk: Walk, shape: Shape, position: int) -> tuple[bool, int]:
    """Let rows wait whose limit is here, and end those that need nothing from here on.

    Returns whether some wait now, and how many ended.
    """
    joined, done, n = False, 0, int(np.int64(walk.first_at[position])) - 1
    while n >= 0:
        following = walk.rows[n, NEXT] - 1
        end = walk.rows[n, END]
        if end < 0:
            walk.rows[n, END] = 0
            walk.waiting[n >> 6] |= _bit(n)
            joined = True
        elif end > 0:
            below = _below(shape, end)
            if below < position:  # it began again, further down, since it was listed
                _list(walk, n, below)
            else:
                _end_row(tree, walk, shape, n)
                done += 1
        n = following
    return joined, done


@device
def _bit(n: int) -> np.uint64:
    return _1 << np.uint64(n & 63)


@device
def _first_of(w: int, rows: np.uint64) -> int:
    """Return the holder of the first of the rows in a word."""
    return w << 6 | int(np.int64(trailing_zeros(rows)))


@device
def _lowest(shape: Shape, c: int, end: int) -> int:
    """Return the lowest block of a class that an end needs; above the end if it needs none."""
    if shape.span:
        return end - end % shape.span + int(shape.classes[c, BLOCKS])
    return end - int(shape.classes[c, REACH])


@device
def _below(shape: Shape, end: int) -> int:
    """Return the position below all blocks that an end needs; 0: the prompt's begin."""
    lowest = _lowest(shape, 0, end)
    for c in range(1, len(shape.classes)):
        lowest = min(lowest, _lowest(shape, c, end))
    return max(lowest - shape.stride, 0)


@device
def _end_row(tree: Tree, walk: Walk, shape: Shape, n: int) -> None:
    write_end(tree, walk.rows[n, ROW], walk.rows[n, END] - shape.dropped)
    walk.rows[n, END] = 0
    _clear_needs(walk, n)


@device
def _clear_needs(walk: Walk, n: int) -> None:
    for c in range(len(walk.needing)):
        walk.needing[c, n >> 6] &= ~_bit(n)


@device
def _read_held(
    classes: Tree, walk: Walk, shape: Shape, reference: np.uint64, last: np.uint64, position: int
) -> np.uint64:
    """Write which rows hold the block here, by class, unless the last one read has the same.

    What lies before a chunk counts as held. Returns what to compare the next one with.
    """
    if shape.span and position % shape.span == 0:
        walk.held[:] = ~_0
        return _NOWHERE
    if reference == last:
        return reference
    if reference >> SEVERAL:
        start, size = classes.sets[of_set(reference, START)], classes.sets[of_set(reference, SIZE)]
        for c in range(len(walk.held)):
            _read_members(classes, start, start + size, np.uint64(c), walk.held[c])
        return reference
    walk.held[:] = _0
    w = int(np.int64(reference >> _WORD_BITS))
    if reference and w < len(walk.waiting):
        for c in range(len(walk.held)):
            walk.held[c, w] = _as_bit(reference, np.uint64(c))
    return reference


@device
def _read_members(classes: Tree, i: np.uint64, end: np.uint64, c: np.uint64, held: Words) -> None:
    """Write the rows of members with a class; members are in the order of their holders."""
    for w in range(len(held)):
        past, bits = np.uint64(w + 1) << _WORD_BITS, _0
        while i < end and classes.members[i] < past:
            bits |= _as_bit(np.uint64(classes.members[i]), c)
            i += _1
        held[w] = bits


@device
def _as_bit(word: np.uint64, c: np.uint64) -> np.uint64:
    """Return the bit of a member's row; 0 if it does not hold the block in this class."""
    return (word >> c & _1) << (word >> MASK_BITS & _63)


@device
def _stop_rows(walk: Walk, shape: Shape, position: int) -> int:
    """Let rows wait again that lack a block here which they need. Returns how many."""
    stopped = 0
    for c in range(len(shape.classes)):
        if floor_to(shape.classes[c, BLOCKS], position) != position:
            continue
        for w in range(len(walk.waiting)):
            lacking = walk.needing[c, w] & ~walk.held[c, w]
            while lacking:
                n = _first_of(w, lacking)
                lacking &= lacking - _1
                if position < _lowest(shape, c, walk.rows[n, END]):
                    walk.needing[c, w] &= ~_bit(n)
                    continue
                walk.rows[n, END] = 0
                walk.waiting[w] |= _bit(n)
                _clear_needs(walk, n)
                stopped += 1
    return stopped


@device
def _start_rows(tree: Tree, walk: Walk, shape: Shape, position: int) -> tuple[int, int]:
    """Start the waiting rows whose classes all stand here; those that need no more end at once.

    Returns how many run, and how many ended.
    """
    started, done = 0, 0
    for w in range(len(walk.waiting)):
        ready = walk.waiting[w]
        for c in range(len(shape.classes)):
            ready &= walk.held[c, w]
        walk.waiting[w] &= ~ready
        while ready:
            n = _first_of(w, ready)
            ready &= ready - _1
            walk.rows[n, END] = position
            if _starts(walk, shape, n, position):
                started += 1
            else:
                _end_row(tree, walk, shape, n)
                done += 1
    return started, done


@device
def _starts(walk: Walk, shape: Shape, n: int, position: int) -> bool:
    """Note what a row needs that has begun here. Returns False if it needs nothing below."""
    below = _below(shape, position)
    if below >= position - shape.stride:
        return False
    for c in range(len(shape.classes)):
        if _lowest(shape, c, position) < position:
            walk.needing[c, n >> 6] |= _bit(n)
    if walk.rows[n, LISTED] >= position:
        _list(walk, n, below)
    return True


@device
def _end_running(tree: Tree, walk: Walk, shape: Shape) -> None:
    """End the rows whose runs reach the prompt's begin: nothing is missing."""
    for w in range(len(walk.waiting)):
        running = _0
        for c in range(len(shape.classes)):
            running |= walk.needing[c, w]
        while running:
            n = _first_of(w, running)
            running &= running - _1
            _end_row(tree, walk, shape, n)
