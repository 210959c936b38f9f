"""The memory of one radix tree: reserved at once, touched as it fills.

Reserving costs address space, not memory: pages of it become real when they are first written, from
the front of each array on. What the limit on blocks cannot need is not reserved.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from router.fresh_memory import reserve
from router.indexer import _sets, _table
from router.indexer._table import Halves, Table, Words

N = TypeVar("N", bound=np.generic)

MAX_HOLDERS = 1 << 16
SUB_BITS = 12
_SET_SUB_BITS = 8
_SPARE_WORDS = 1024


class Memory:
    """Arrays of a radix tree, and the `state` that tells kernels where they lie.

    `holders` has shape (holders, HOLDER_COLUMNS), `sets` (sets, SET_COLUMNS), `members` is flat.
    """

    __slots__ = (
        "_owned",
        "address",
        "blocks",
        "ends",
        "holders",
        "members",
        "set_table",
        "sets",
        "state",
    )

    def __init__(
        self, max_blocks: int, multiplier: int, check_interval: int, sub_bits: int = SUB_BITS
    ) -> None:
        self._owned: list[npt.NDArray[np.generic]] = []
        self.state: Words = np.zeros(_sets.STATE_WORDS, np.uint64)
        max_sets = max(max_blocks + 1, 1 << 10)  # one per block, one while it replaces another
        max_members = min(max(8 * max_blocks, 1 << 18), 1 << 32)
        self.blocks = self._lay_table(_sets.BLOCK_TABLE, max_blocks, multiplier, sub_bits)
        set_sub_bits = min(sub_bits, _SET_SUB_BITS)
        self.set_table = self._lay_table(_sets.SET_TABLE, max_sets, multiplier, set_sub_bits)
        self.holders: Words = self._words(MAX_HOLDERS * _sets.HOLDER_COLUMNS, _sets.HOLDERS)
        self.sets: Words = self._words((max_sets + 1) * _sets.SET_COLUMNS, _sets.SETS)
        self.members: Halves = self._halves(max_members, _sets.MEMBERS)
        self.ends: Halves = self._halves(MAX_HOLDERS * _sets.ENDS_COLUMNS, _sets.ENDS)
        self._words(5 * MAX_HOLDERS + _SPARE_WORDS, _sets.SCRATCH)
        self.holders = self.holders.reshape(MAX_HOLDERS, _sets.HOLDER_COLUMNS)
        self.sets = self.sets.reshape(max_sets + 1, _sets.SET_COLUMNS)
        self.address = int(self.state.ctypes.data)
        self.state[_sets.MAX_HOLDERS] = MAX_HOLDERS
        self.state[_sets.MAX_MEMBERS] = max_members
        self.state[_sets.NEXT_MEMBER] = 2  # 0 ends the lists of free stretches
        self.state[_sets.CHECK_INTERVAL] = self.state[_sets.UNTIL_CHECK] = check_interval

    def _lay_table(self, base: int, max_keys: int, multiplier: int, sub_bits: int) -> Table:
        """Room for the keys wherever they fall, at the emptiest that growing leaves the pages."""
        subs = 1 << sub_bits
        page_keys = int(_table.PAGE_SLOTS) * 3 // 4
        max_pages = max_keys * 5 // (4 * page_keys) + 2 * subs
        max_sub_pages = 4 * max_pages // subs + 16
        header = self.state[base : base + _table.HEADER_WORDS]
        header[_table.MULTIPLIER] = multiplier
        header[_table.INVERSE] = pow(multiplier, -1, 1 << 64)
        header[_table.SUB_BITS] = sub_bits
        header[_table.MAX_COUNT] = max_keys
        header[_table.MAX_PAGES] = max_pages
        header[_table.MAX_SUB_PAGES] = max_sub_pages
        return Table(
            header,
            self._words(2 * max_pages * int(_table.PAGE_SLOTS), base + int(_table.SLOTS)),
            self._halves(max_sub_pages * subs, base + int(_table.PAGES)),
            self._halves(subs, base + int(_table.CAPACITY)),
            self._halves(subs, base + int(_table.USED)),
        )

    def _words(self, length: int, place: int | np.uint64) -> Words:
        return self._own(reserve(length, np.uint64), place)

    def _halves(self, length: int, place: int | np.uint64) -> Halves:
        return self._own(reserve(length, np.uint32), place)

    def _own(self, array: npt.NDArray[N], place: int | np.uint64) -> npt.NDArray[N]:
        self._owned.append(array)
        self.state[place] = array.ctypes.data
        return array
