"""The engine's procedure, for one rank at a time, of the layouts that no walk serves.

These have hits inside blocks, EAGLE in windows beside other classes, or sizes that do not fit.
Each kind of layer accepts the length found so far or shortens it, until all accept. With EAGLE, a
kind looks one block further once, and drops the last block of what it found.

Source: vLLM 0.32's `HybridKVCacheCoordinator.find_longest_cache_hit` and
`single_type_kv_cache_manager.py`.
"""

from typing import NamedTuple

import numpy as np

from router.indexer.radix_tree._block_table import AHEAD, Words, fetch, look_up
from router.indexer.radix_tree._holder_sets import (
    CLASS_HOLDER,
    ENDS_COLUMNS,
    LAYOUT,
    MASK,
    VISIBLE,
    Tree,
    of_holder,
    position_of,
    word_of,
)
from router.protocol.values import TIERS
from router.runtime.kernels.numba_runtime import device, words_at

# Words of a layout, then those of each class.
ALIGNMENT = 0
FULL_SIZE = 1
IS_FULL_EAGLE = 2
IS_STEPWISE = 3
CLASSES = 4
FIRST_CLASS = 5
CLASS_WORDS = 4
KIND, CLASS_TOKENS, SPAN, IS_EAGLE = 0, 1, 2, 3
LAYOUT_WORDS = FIRST_CLASS + 4 * CLASS_WORDS
"""Words of a layout, sizes in tokens. `IS_STEPWISE`: it needs the engine's procedure."""

WINDOW, STATE, CHUNK, TAIL = 0, 1, 2, 3

_0 = np.uint64(0)
_1 = np.uint64(1)


@device
def number_at(layout: Words, place: int) -> int:
    """Return a word of a layout as a signed number: with unsigned ones results would be floats."""
    return int(np.int64(layout[place]))


@device
def references_of(classes: Tree, keys: Words) -> Words:
    """Return what the second tree has at each position of a prompt."""
    found = np.empty(len(keys), np.uint64)
    for i in range(len(keys)):
        if i + AHEAD < len(keys):
            fetch(classes.blocks, keys[i + AHEAD])
        found[i] = look_up(classes.blocks, keys[i])
    return found


@device
def write_end(tree: Tree, row: int, end: int) -> None:
    """Set the ends of a row in all tiers: blocks of classes are on the device only."""
    for tier in range(TIERS):
        tree.ends[row * ENDS_COLUMNS + 1 + tier] = np.uint32(end)


class Asked(NamedTuple):
    """The references along a prompt in the second tree, and the rank whose blocks are sought.

    `holder`: -1 if it holds nothing. `visible`: its classes that searches see.
    """

    references: Words
    holder: int
    visible: np.uint64
    block_size: int
    isl_tokens: int


@device
def cut_stepwise(
    tree: Tree, classes: Tree, rows: int, references: Words, isl_tokens: int, block_size: int
) -> None:
    """Shorten the ends of the rows whose layouts need the procedure; `isl_tokens`: the prompt's."""
    for row in range(rows):
        holder = np.uint64(tree.ends[row * ENDS_COLUMNS])
        address = tree.holders[of_holder(holder, LAYOUT)]
        if address == _0:
            continue
        layout = words_at(address, np.uint64(LAYOUT_WORDS))
        if layout[IS_STEPWISE] == _0:
            continue
        held_by, visible = int(tree.holders[of_holder(holder, CLASS_HOLDER)]) - 1, MASK
        if held_by >= 0:
            visible = classes.holders[of_holder(np.uint64(held_by), VISIBLE)]
        asked = Asked(references, held_by, visible, block_size, isl_tokens)
        full_tokens = int(tree.ends[row * ENDS_COLUMNS + 1]) * block_size
        tokens = _step_down(classes, layout, asked, full_tokens)
        write_end(tree, row, tokens // block_size)


@device
def _holds(classes: Tree, asked: Asked, c: int, end: int) -> bool:
    index = end // asked.block_size - 1
    if asked.holder < 0 or index >= len(asked.references) or end % asked.block_size:
        return False
    reference, holder = asked.references[index], np.uint64(asked.holder)
    word = word_of(classes, reference, position_of(classes, reference, holder), holder)
    return bool((word & asked.visible) >> np.uint64(c) & _1)


@device
def _step_down(classes: Tree, layout: Words, asked: Asked, full_tokens: int) -> int:
    """Return the tokens that one rank need not compute."""
    full_size, count = number_at(layout, FULL_SIZE), number_at(layout, CLASSES)
    tail = _tail_of(layout)
    kinds = count + (1 if full_size else 0) - (1 if tail >= 0 else 0)
    hit, full, dropped = asked.isl_tokens - 1, -1, 0
    while hit > 0 and kinds:
        now = hit
        if full >= 0:
            now = min(now, full)
        elif full_size:
            full = now = _full_end(classes, layout, asked, full_tokens, now, kinds)
        for c in range(count):
            if c != tail:
                now, dropped = _lower(classes, layout, asked, c, now, dropped, kinds)
        if now >= hit or kinds == 1 or (kinds == 2 and full_size):
            return max(min(now, hit), 0)
        hit = now
    return 0


@device
def _lower(
    classes: Tree, layout: Words, asked: Asked, c: int, now: int, dropped: int, kinds: int
) -> tuple[int, int]:
    """Return the length that a class accepts, and the classes that have dropped a block since."""
    is_eagle = layout[FIRST_CLASS + c * CLASS_WORDS + IS_EAGLE] != _0
    drops = is_eagle and not dropped >> c & 1
    found = _class_end(classes, layout, asked, c, now, drops, kinds)
    if drops:
        return found, dropped | 1 << c
    return found, 0 if found < now else dropped


@device
def _tail_of(layout: Words) -> int:
    """Return the class of places inside full attention's blocks where hits may end; -1: none."""
    tail = -1
    for c in range(number_at(layout, CLASSES)):
        if number_at(layout, FIRST_CLASS + c * CLASS_WORDS + KIND) == TAIL:
            tail = int(c)
    return tail


@device
def _full_end(
    classes: Tree, layout: Words, asked: Asked, full_tokens: int, top: int, kinds: int
) -> int:
    size, alignment = number_at(layout, FULL_SIZE), number_at(layout, ALIGNMENT)
    tail, dropped = _tail_of(layout), 0
    if layout[IS_FULL_EAGLE] != _0:
        dropped = min(size, alignment) if tail >= 0 else size
        if kinds > 1:
            top = min(top + dropped, asked.isl_tokens)
    end = min(full_tokens, top) // size * size
    if tail >= 0:
        inside = min(end + size - alignment, top // alignment * alignment)
        while inside > end and not _holds(classes, asked, tail, inside):
            inside -= alignment
        end = max(inside, end)
    end = max(end - dropped, 0)
    return end - end % alignment


@device
def _class_end(
    classes: Tree, layout: Words, asked: Asked, c: int, now: int, drops: bool, kinds: int
) -> int:
    """Return the end of the longest hit of a class, at most `now`."""
    first = FIRST_CLASS + c * CLASS_WORDS
    kind, size = number_at(layout, first + KIND), number_at(layout, first + CLASS_TOKENS)
    span, alignment = number_at(layout, first + SPAN), number_at(layout, ALIGNMENT)
    top = now
    if drops and kinds > 1 and kind != STATE:
        top = min(now + size, asked.isl_tokens)
    if kind == WINDOW:
        return _window_end(classes, asked, c, size, span, alignment, top, drops)
    if kind == STATE:
        end = top - top % size
        while end > 0 and (end % alignment or not _holds(classes, asked, c, end)):
            end -= size
        return end
    end = top // span * span // size * size  # what lies before the chunk counts as held
    while end + size <= top and _holds(classes, asked, c, end + size):
        end += size
    return end


@device
def _window_end(
    classes: Tree,
    asked: Asked,
    c: int,
    size: int,
    span: int,
    alignment: int,
    top: int,
    drops: bool,
) -> int:
    dropped = size if drops else 0
    needed = -(-(span - 1) // size) + (1 if drops else 0)
    end, run = top - top % size, 0
    while end > 0 and run < needed:
        if (run or (end - dropped) % alignment == 0) and _holds(classes, asked, c, end):
            run += 1
        else:
            run = 0
        end -= size
    found = end + run * size
    if run < needed:  # it reaches the prompt's begin: nothing is missing
        found -= found % alignment
    if drops and found:
        found -= size
        found -= found % alignment
    return found
