"""Kernels of `last_prompt.py`: an open-addressing table {block, serial of a prompt}; 0 is a gap.

A block is in its home slot, or behind it without a gap between. At most half of the slots are used,
and their number is a power of two.
"""

import numpy as np
import numpy.typing as npt

from router.runtime.kernels.numba_runtime import device, kernel

Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.uint64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_0 = np.uint64(0)
_1 = np.uint64(1)
_32 = np.uint64(32)


@device
def _home(block: np.uint64, mask: np.uint64) -> np.uint64:
    return ((block * _MULTIPLIER) >> _32) & mask


@device
def _place(slots: Slots, block: np.uint64, mask: np.uint64) -> np.uint64:
    """Return the slot of a block, or the gap where it belongs."""
    at = _home(block, mask)
    while slots[at, 1] != _0 and slots[at, 0] != block:
        at = (at + _1) & mask
    return at


@device
def _close(slots: Slots, gap: np.uint64, mask: np.uint64) -> None:
    """Empty a slot, and move up the blocks behind it that are not in their home slots."""
    at = (gap + _1) & mask
    while slots[at, 1] != _0:
        way = (at - _home(slots[at, 0], mask)) & mask
        if way >= (at - gap) & mask:
            slots[gap, 0], slots[gap, 1] = slots[at, 0], slots[at, 1]
            gap = at
        at = (at + _1) & mask
    slots[gap, 1] = _0


@kernel(
    "UniTuple(int64, 3)(uint64[:, ::1], Array(uint64, 1, 'C', readonly=True), uint64,"
    " uint64[::1], uint64[:, ::1])"
)
def name(
    slots: Slots, blocks: Words, serial: np.uint64, named: Words, runs: Slots
) -> tuple[int, int, int]:
    """Set a new prompt as the last one of these blocks. Returns counts: blocks, new blocks, runs.

    Writes each block once to `named`, and to `runs` the runs of blocks that another prompt had
    named last, {serial, blocks}. New blocks are those that no prompt had named before.
    """
    mask = np.uint64(len(slots) - 1)
    count, new, run = 0, 0, -1
    for block in blocks:
        at = _place(slots, block, mask)
        before = slots[at, 1]
        if before == serial:
            continue
        slots[at, 0], slots[at, 1] = block, serial
        named[count] = block
        count += 1
        if before == _0:
            new += 1
        elif run >= 0 and runs[run, 0] == before:
            runs[run, 1] += _1
        else:
            run += 1
            runs[run, 0], runs[run, 1] = before, _1
    return count, new, run + 1


@kernel("void(uint64[:, ::1], Array(uint64, 1, 'C', readonly=True), uint64[::1])")
def last(slots: Slots, blocks: Words, serials: Words) -> None:
    """Write the serial of the last prompt of each of these blocks; 0 if there is none."""
    mask = np.uint64(len(slots) - 1)
    for i in range(len(blocks)):
        serials[i] = slots[_place(slots, blocks[i], mask), 1]


@kernel("void(uint64[:, ::1], Array(uint64, 1, 'C', readonly=True))")
def forget(slots: Slots, blocks: Words) -> None:
    """Remove these blocks, which must all be present, each named once."""
    mask = np.uint64(len(slots) - 1)
    for block in blocks:
        _close(slots, _place(slots, block, mask), mask)


@kernel("void(uint64[:, ::1], uint64[:, ::1])")
def move(slots: Slots, empty: Slots) -> None:
    """Copy all blocks to an empty table."""
    mask = np.uint64(len(empty) - 1)
    for i in range(len(slots)):
        if slots[i, 1] != _0:
            at = _place(empty, slots[i, 0], mask)
            empty[at, 0], empty[at, 1] = slots[i, 0], slots[i, 1]
