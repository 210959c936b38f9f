"""Grouping of dumped rows {holder, block} by rank: the way to read out the flat tree."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from router.indexer.base import ExportedBlocks, HeldSlice
from router.indexer.radix_tree import _grouping_kernel
from router.indexer.radix_tree._holder_sets import MASK_BITS
from router.protocol.values import TIERS, Rank, Tier


def blocks_by_rank(slices: Iterable[HeldSlice]) -> Iterator[ExportedBlocks]:
    """Yield the blocks of the slices by rank and tier. O(blocks held).

    Skips ids that belonged to no rank when the dump began. May run on another thread, and mostly
    does so without the GIL.
    """
    for _, of_tree in groupby(slices, key=lambda each: id(each.rank_of)):
        here = list(of_tree)
        yield from _grouped(here[0].rank_of, here)


def _grouped(rank_of: Mapping[int, Rank], slices: Sequence[HeldSlice]) -> Iterator[ExportedBlocks]:
    last = max(int(each.rows[:, 0].max(initial=0)) for each in slices) >> int(MASK_BITS)
    counts = np.zeros((max(last, *rank_of, 0) + 1, TIERS), np.uint64)
    total = sum(_grouping_kernel.count(each.rows, counts) for each in slices)
    blocks = np.empty(total, np.uint64)
    starts = (np.cumsum(counts) - counts.ravel()).astype(np.uint64).reshape(counts.shape)
    ends = starts.copy()
    for each in slices:
        _grouping_kernel.lay(each.rows, ends, blocks)
    for rank, holder in sorted((rank, holder) for holder, rank in rank_of.items()):
        for tier in Tier:
            if counts[holder, tier]:
                span = slice(int(starts[holder, tier]), int(ends[holder, tier]))
                yield ExportedBlocks(rank, tier, blocks[span])
