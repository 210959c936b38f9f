"""Results of kernels as Python objects: of a search, as a mapping; of a dump, by rank and tier."""

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.indexer.base import ExportedBlocks, HeldSlice, Overlap
from router.indexer.radix_tree import _grouping_kernel, _holder_sets
from router.protocol.values import TIERS, Rank, Tier

ROW_BYTES = 4 * (1 + TIERS)


class Matches(Struct):
    """Overlap per rank; implements `OverlapScores`.

    The first `get` scans the rows for one rank, as a booking needs; any further access converts
    all rows into Python objects.
    `rank_of`: the rank of each holder id, or slot, at the time of the search; never changed after.
    `rows`: little-endian u32 {holder id, overlap in each cumulative tier}, one row after the other.
    """

    rank_of: Sequence[Rank] | Mapping[int, Rank]
    rows: bytes
    by_rank: dict[Rank, Overlap] | None = None
    was_asked: bool = False

    @property
    def array(self) -> npt.NDArray[np.uint32]:
        """The rows, of shape (matches, 1 + TIERS); read-only."""
        return np.frombuffer(self.rows, "<u4").reshape(-1, 1 + TIERS)

    def __getitem__(self, rank: Rank) -> Overlap:
        return self._overlaps()[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._overlaps())

    def __len__(self) -> int:
        return len(self.rows) // ROW_BYTES

    def __contains__(self, rank: object) -> bool:
        return rank in self._overlaps()

    def get(self, rank: Rank, default: Overlap) -> Overlap:
        """Return the rank's overlap, or the default."""
        if self.was_asked:
            return self._overlaps().get(rank, default)
        self.was_asked = True
        numbers = memoryview(self.rows).cast("I").tolist()
        for start in range(0, len(numbers), 1 + TIERS):
            if self.rank_of[numbers[start]] == rank:
                return Overlap(*numbers[start + 1 : start + 1 + TIERS])
        return default

    def items(self) -> ItemsView[Rank, Overlap]:
        """Return the ranks and their overlaps."""
        return self._overlaps().items()

    def _overlaps(self) -> dict[Rank, Overlap]:
        if self.by_rank is None:
            self.by_rank = {
                self.rank_of[holder]: Overlap(*ends) for holder, *ends in self.array.tolist()
            }
        return self.by_rank


def blocks_by_rank(slices: Iterable[HeldSlice]) -> Iterator[ExportedBlocks]:
    """Yield the blocks of the slices by rank and tier. O(blocks held).

    Skips ids that belonged to no rank when the dump began. May run on another thread, and mostly
    does so without the GIL.
    """
    for _, of_tree in groupby(slices, key=lambda each: id(each.rank_of)):
        here = list(of_tree)
        yield from _grouped(here[0].rank_of, here)


def _grouped(rank_of: Mapping[int, Rank], slices: Sequence[HeldSlice]) -> Iterator[ExportedBlocks]:
    last = max(int(each.rows[:, 0].max(initial=0)) for each in slices) >> int(
        _holder_sets.MASK_BITS
    )
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
