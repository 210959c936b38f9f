"""The result of a search, as the kernel wrote it, with the interface of a mapping."""

from collections.abc import ItemsView, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.indexer.base import Overlap
from router.protocol.values import TIERS, Rank

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
