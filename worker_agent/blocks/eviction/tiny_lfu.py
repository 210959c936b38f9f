"""How often something was asked for, in four bits a counter, forgetting with time.

A count-min sketch of four rows: a name's count is at least what it was (up to 15), and too high
only where all four of its counters are shared. Source: Einziger, Friedman, Manes: TinyLFU (2017).
"""

import numpy as np

ROWS = 4
MAX_COUNT = 15
ASKS_A_COUNTER = 10
"""All counts are halved after so many asks for each counter of a row."""


class TinyLfu:
    """Counts of names of 16 bytes that are themselves uniform (hashes). 4 bytes a counter."""

    __slots__ = ("_asked", "_counters", "_mask")

    def __init__(self, capacity: int) -> None:
        """`capacity`: how many names are to be told apart; rounded up to a power of two."""
        width = 1 << max(capacity - 1, 1).bit_length()
        self._mask = width - 1
        self._counters = [bytearray(width) for _ in range(ROWS)]
        self._asked = 0

    def note(self, identity: bytes) -> None:
        """Somebody asked for this. O(1), but for a halving now and then."""
        for row, place in zip(self._counters, self._places(identity), strict=True):
            if row[place] < MAX_COUNT:
                row[place] += 1
        self._asked += 1
        if self._asked >= ASKS_A_COUNTER * (self._mask + 1):
            self._halve()

    def count(self, identity: bytes) -> int:
        """How often somebody asked, 0 to 15."""
        places = zip(self._counters, self._places(identity), strict=True)
        return min(row[place] for row, place in places)

    def _places(self, identity: bytes) -> tuple[int, int, int, int]:
        whole, mask = int.from_bytes(identity, "little"), self._mask
        return whole & mask, whole >> 32 & mask, whole >> 64 & mask, whole >> 96 & mask

    def _halve(self) -> None:
        for row in self._counters:
            counts = np.frombuffer(row, dtype=np.uint8)
            np.right_shift(counts, 1, out=counts)
        self._asked //= 2
