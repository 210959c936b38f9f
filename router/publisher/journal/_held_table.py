"""The table of one rank's blocks, used by `_held_kernel.py`; see `_growing_table.py`.

    slot: │ sequence hash │ parent │ children, tiers 0 and 1 │ … 2 and 3 │ flags │     5 words, 40 B

    flags: the tier mask │ has a parent │ is used

Storing never moves a slot, so that a block's parent, most often stored just before it, is still in
its slot. A table's memory is touched page by page as slots are written; that of a large table
beforehand, while the former one fills.
"""

from typing import TypeAlias

import numpy as np

from router.runtime.kernels._growing_table import (
    TABLE_WORDS,
    Table,
    Words,
    close,
    find,
    home_slot,
    prefetch_slot,
    table_of_header,
)
from router.runtime.kernels.numba_runtime import device, words_at

# Word indexes within a slot.
KEY = np.uint64(0)
PARENT = np.uint64(1)
CHILDREN = np.uint64(2)
FLAGS = np.uint64(4)
SLOT_WORDS = np.uint64(5)

# Bits of the flags word.
MASK = np.uint64(15)
HAS_PARENT = np.uint64(16)
IS_USED = np.uint64(32)

# Word indexes within the header, after those of the table.
MULTIPLIER = np.uint64(TABLE_WORDS)
USED = np.uint64(10)
MAX_USED = np.uint64(11)
HOLES = np.uint64(12)
COUNTS = np.uint64(16)
DIGESTS = np.uint64(20)
HEADER_WORDS = 24

NOWHERE = np.uint64(2**64 - 1)
"""The value that stands for no slot."""

Blocks: TypeAlias = Table

_0 = np.uint64(0)
_1 = np.uint64(1)
_LINE = np.uint64(8)


@device
def blocks_at(address: np.uint64) -> Blocks:
    """Return the table that the header at an address describes."""
    header = words_at(address, np.uint64(HEADER_WORDS))
    return table_of_header(header, SLOT_WORDS, FLAGS, header[MULTIPLIER])


@device
def place(blocks: Blocks, key: np.uint64) -> np.uint64:
    """Return the slot of a key, and create it if it is missing. The table must have room."""
    slot = find(blocks, key)
    if blocks.memory[slot + FLAGS] == _0:
        for word in range(SLOT_WORDS):
            blocks.memory[slot + np.uint64(word)] = _0
        blocks.memory[slot + KEY] = key
        blocks.memory[slot + FLAGS] = IS_USED
        blocks.header[USED] += _1
    return slot


@device
def erase(blocks: Blocks, slot: np.uint64) -> None:
    """Remove a slot's block."""
    close(blocks, slot)
    blocks.header[USED] -= _1


@device
def fetch(blocks: Blocks, keys: Words, i: int) -> None:
    """Prefetch the home of the key at index `i`, for a later search."""
    if i < len(keys):
        slot = home_slot(blocks, keys[i] * blocks.multiplier)
        prefetch_slot(blocks, slot)
        prefetch_slot(blocks, slot + _LINE)  # Most searches end within these two cache lines.
