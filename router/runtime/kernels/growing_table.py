"""The memory of a hash table that grows without a pause; `_growing_table.py` has its kernels."""

import numpy as np
import numpy.typing as npt

from router.runtime.kernels import _growing_table as table
from router.runtime.kernels.reserved_memory import PreviousTable

Words = npt.NDArray[np.uint64]


class GrowingTable:
    """The slots of a table, and those of the former one while they move.

    `header` is the owner's, whose first `TABLE_WORDS` words describe the table.
    """

    __slots__ = ("_header", "_mark", "_width", "former", "slots")

    def __init__(self, header: Words, slots: Words, width: int, mark: int) -> None:
        """Begin with empty slots, a power of two in number."""
        self._header, self._width, self._mark = header, width, mark
        self.former: PreviousTable[np.uint64] | None = None
        header[table.MOVED] = table.ALL
        self._lay_out(slots)

    def replace(self, slots: Words) -> None:
        """Continue in more slots, which are empty, after `begin_to_move`."""
        start = int(self._header[table.START])
        self.former = PreviousTable(self.slots, self._width, self._mark, start)
        self._lay_out(slots)

    def _lay_out(self, slots: Words) -> None:
        count = len(slots) // self._width
        self.slots = slots
        self._header[table.PRESENT + table.FIRST] = slots.ctypes.data // 8
        self._header[table.PRESENT + table.LAST] = count - 1
        self._header[table.PRESENT + table.SHIFT] = 65 - count.bit_length()

    def follow_moves(self) -> None:
        """Release the memory of former slots that have moved."""
        if self.former is None:
            return
        moved = int(self._header[table.MOVED])
        if moved == table.ALL:
            self.former = None
        else:
            self.former.release(int(self._header[table.START]) + moved)

    def used_slots(self) -> Words:
        """Return all slots in use, unordered; the shape is (slots, width). O(capacity)."""
        parts = [self.slots.reshape(-1, self._width)]
        if self._header[table.MOVED] != table.ALL and self.former is not None:
            parts.append(self.former.slots)
        return np.concatenate([part[part[:, self._mark] != 0] for part in parts])

    def check_places(self, multiplier: int) -> None:
        """Assert that each slot is in the right table, with no gap after its home. O(capacity)."""
        self._check_part(int(table.PRESENT), self.slots.reshape(-1, self._width), multiplier)
        if self._header[table.MOVED] != table.ALL:
            assert self.former is not None
            self._check_part(int(table.FORMER), self.former.slots, multiplier)

    def _check_part(self, part: int, slots: Words, multiplier: int) -> None:
        positions = np.flatnonzero(slots[:, self._mark])
        spreads = slots[positions, 0] * np.uint64(multiplier)  # modulo 2**64
        assert (self._parts_of(spreads) == part).all()
        shift = self._header[part + int(table.SHIFT)]
        homes = (spreads >> shift).astype(np.int64)
        is_empty = np.tile(slots[:, self._mark] == 0, 2)
        empty_before = np.cumsum(is_empty) - is_empty
        ends = np.where(positions < homes, positions + len(slots), positions)
        assert (empty_before[ends] == empty_before[homes]).all()

    def _parts_of(self, spreads: Words) -> npt.NDArray[np.int64]:
        former, moved = int(table.FORMER), int(self._header[table.MOVED])
        if moved == int(table.ALL):
            return np.full(len(spreads), int(table.PRESENT))
        homes = spreads >> self._header[former + int(table.SHIFT)]
        distances = homes - self._header[table.START]  # modulo 2**64
        is_behind = distances & self._header[former + int(table.LAST)] >= moved
        return np.where(is_behind, former, int(table.PRESENT))
