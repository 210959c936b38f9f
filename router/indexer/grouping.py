"""From blocks and references to blocks by rank: how the flat tree is read out."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from router.indexer import _sets
from router.indexer._memory import Memory
from router.indexer.base import HeldBlocks
from router.protocol.values import HashArray, Rank, Tier

_SET = int(_sets.SET)


def blocks_by_rank(
    memory: Memory, rank_of: Sequence[Rank], pairs: npt.NDArray[np.uint64]
) -> Iterator[HeldBlocks]:
    """Exported pairs {block, reference} as blocks per rank and tier, of visible holders only.

    Blocks with the same holders are handled together. O(blocks · log blocks + blocks held).
    """
    held: dict[tuple[Rank, Tier], list[HashArray]] = {}
    for reference, blocks in _by_reference(pairs):
        for word in _members(memory, reference):
            holder = word >> int(_sets.MASK_BITS)
            visible = word & int(memory.holders[holder, _sets.VISIBLE])
            for tier in Tier:
                if visible >> tier & 1:
                    held.setdefault((rank_of[holder], tier), []).append(blocks)
    return (
        HeldBlocks(rank, tier, np.concatenate(arrays))
        for (rank, tier), arrays in sorted(held.items())
    )


def _by_reference(pairs: npt.NDArray[np.uint64]) -> Iterator[tuple[int, HashArray]]:
    order = np.argsort(pairs[:, 1], kind="stable")
    blocks, references = pairs[order, 0], pairs[order, 1]
    starts = np.flatnonzero(np.diff(references, prepend=~references[:1]))
    for start, end in pairwise([*starts.tolist(), len(blocks)]):
        yield int(references[start]), blocks[start:end]


def _members(memory: Memory, reference: int) -> list[int]:
    if not reference & _SET:
        return [reference]
    row = memory.sets[reference & ~_SET]
    start, size = int(row[_sets.START]), int(row[_sets.SIZE])
    members: list[int] = memory.members[start : start + size].tolist()
    return members
