"""Frequencies of requests, in four bits a counter, with aging.

A count-min sketch of four rows: a name's count is at least its true count (up to 15), and too high
only if all four of its counters are shared. Source: Einziger, Friedman, Manes: TinyLFU (2017).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROWS = 4
MAX_COUNT = 15
ASKS_A_COUNTER = 10
"""Requests per counter of a row after which all counts are halved."""

FEW = 16
"""Up to this number, names are faster counted one by one than together."""
MAX_AT_ONCE = 255 - MAX_COUNT
"""Limit of names counted at once: even if all are the same, a full counter fits in a byte."""


class TinyLfu:
    """Counts of 16-byte names that are themselves uniform (hashes). 4 bytes per counter."""

    __slots__ = ("_asked", "_counters", "_mask", "_views")

    def __init__(self, capacity: int) -> None:
        """Initialise for `capacity` distinct names, rounded up to a power of two."""
        width = 1 << max(capacity - 1, 1).bit_length()
        self._mask = width - 1
        self._counters = [bytearray(width) for _ in range(ROWS)]
        self._views = [np.frombuffer(row, dtype=np.uint8) for row in self._counters]
        self._asked = 0

    def note(self, identities: Sequence[bytes]) -> None:
        """Count a request for each of these. O(names), except for an occasional halving."""
        start, limit = 0, ASKS_A_COUNTER * (self._mask + 1)
        while start < len(identities):
            stop = min(start + min(limit - self._asked, MAX_AT_ONCE), len(identities))
            self._add(identities[start:stop])
            self._asked += stop - start
            start = stop
            if self._asked >= limit:
                self._halve()

    def counts(self, identities: Sequence[bytes]) -> list[int]:
        """Return the number of requests for each name, 0 to 15."""
        if len(identities) <= FEW:
            return [self._count(identity) for identity in identities]
        rows = zip(self._views, self._all_places(identities), strict=True)
        counts: list[int] = np.min([row[places] for row, places in rows], axis=0).tolist()
        return counts

    def _add(self, identities: Sequence[bytes]) -> None:
        if len(identities) > FEW:
            for view, places in zip(self._views, self._all_places(identities), strict=True):
                np.add.at(view, places, np.uint8(1))
                view[places] = np.minimum(view[places], MAX_COUNT)
            return
        for identity in identities:
            for row, place in zip(self._counters, self._places(identity), strict=True):
                if row[place] < MAX_COUNT:
                    row[place] += 1

    def _count(self, identity: bytes) -> int:
        places = zip(self._counters, self._places(identity), strict=True)
        return min(row[place] for row, place in places)

    def _places(self, identity: bytes) -> tuple[int, int, int, int]:
        whole, mask = int.from_bytes(identity, "little"), self._mask
        return whole & mask, whole >> 32 & mask, whole >> 64 & mask, whole >> 96 & mask

    def _all_places(self, identities: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Return the places of many names, as (rows, names)."""
        words = np.frombuffer(b"".join(identities), dtype="<u4").reshape(-1, ROWS)
        return (words.T & np.uint32(self._mask)).astype(np.int64)

    def _halve(self) -> None:
        for view in self._views:
            np.right_shift(view, 1, out=view)
        self._asked //= 2
