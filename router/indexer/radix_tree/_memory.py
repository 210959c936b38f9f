"""The memory of one radix tree: reserved at once, used as it fills.

Reserving uses address space, not memory: the system allocates a page when it is first written, and
each array is written from its front on. No more is reserved than the limit on blocks can need.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from router.indexer.radix_tree import _block_table, _holder_sets
from router.indexer.radix_tree._block_table import Halves, Table, Words
from router.runtime.kernels.reserved_memory import reserve

N = TypeVar("N", bound=np.generic)

MAX_HOLDERS = 1 << 16
SUB_BITS = 12
_SET_SUB_BITS = 8
_SPARE_WORDS = 1024


class Memory:
    """The arrays of a radix tree, and the `state` that holds their addresses for the kernels.

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
        self.state: Words = np.zeros(_holder_sets.STATE_WORDS, np.uint64)
        max_sets = max(max_blocks + 1, 1 << 10)  # one per block, one while it replaces another
        max_members = min(max(8 * max_blocks, 1 << 18), 1 << 32)
        self.blocks = self._lay_table(_holder_sets.BLOCK_TABLE, max_blocks, multiplier, sub_bits)
        set_sub_bits = min(sub_bits, _SET_SUB_BITS)
        self.set_table = self._lay_table(_holder_sets.SET_TABLE, max_sets, multiplier, set_sub_bits)
        self.holders: Words = self._words(
            MAX_HOLDERS * _holder_sets.HOLDER_COLUMNS, _holder_sets.HOLDERS
        )
        self.sets: Words = self._words((max_sets + 1) * _holder_sets.SET_COLUMNS, _holder_sets.SETS)
        self.members: Halves = self._halves(max_members, _holder_sets.MEMBERS)
        self.ends: Halves = self._halves(MAX_HOLDERS * _holder_sets.ENDS_COLUMNS, _holder_sets.ENDS)
        self._words(6 * MAX_HOLDERS + _SPARE_WORDS, _holder_sets.SCRATCH)
        self.holders = self.holders.reshape(MAX_HOLDERS, _holder_sets.HOLDER_COLUMNS)
        self.sets = self.sets.reshape(max_sets + 1, _holder_sets.SET_COLUMNS)
        self.address = int(self.state.ctypes.data)
        self.state[_holder_sets.MAX_HOLDERS] = MAX_HOLDERS
        self.state[_holder_sets.MAX_MEMBERS] = max_members
        self.state[_holder_sets.NEXT_MEMBER] = 2  # 0 ends the lists of free stretches
        self.state[_holder_sets.CHECK_INTERVAL] = self.state[_holder_sets.UNTIL_CHECK] = (
            check_interval
        )

    def _lay_table(self, base: int, max_keys: int, multiplier: int, sub_bits: int) -> Table:
        """Reserve a table for any distribution of the keys, at the lowest load growth can leave."""
        subs = 1 << sub_bits
        page_keys = int(_block_table.PAGE_SLOTS) * 3 // 4
        max_pages = max_keys * 5 // (4 * page_keys) + 2 * subs
        max_sub_pages = 4 * max_pages // subs + 16
        header = self.state[base : base + _block_table.HEADER_WORDS]
        header[_block_table.MULTIPLIER] = multiplier
        header[_block_table.INVERSE] = pow(multiplier, -1, 1 << 64)
        header[_block_table.SUB_BITS] = sub_bits
        header[_block_table.MAX_COUNT] = max_keys
        header[_block_table.MAX_PAGES] = max_pages
        header[_block_table.MAX_SUB_PAGES] = max_sub_pages
        return Table(
            header,
            self._words(
                2 * max_pages * int(_block_table.PAGE_SLOTS), base + int(_block_table.SLOTS)
            ),
            self._halves(max_sub_pages * subs, base + int(_block_table.PAGES)),
            self._halves(subs, base + int(_block_table.CAPACITY)),
            self._halves(subs, base + int(_block_table.USED)),
        )

    def _words(self, length: int, place: int | np.uint64) -> Words:
        return self._own(reserve(length, np.uint64), place)

    def _halves(self, length: int, place: int | np.uint64) -> Halves:
        return self._own(reserve(length, np.uint32), place)

    def _own(self, array: npt.NDArray[N], place: int | np.uint64) -> npt.NDArray[N]:
        self._owned.append(array)
        self.state[place] = array.ctypes.data
        return array
