"""What one rank holds, kept at the edge: tiers, counts, digests, and holes.

A router can gallop through a prompt only if what the rank holds is closed under prefixes. Whether
it is takes a count over children, which nobody but the edge can keep cheaply, so it is kept here
and sent along. With r(n) the fastest tier that holds n (TIERS: none), the edge from parent p to n
is a hole of cumulative tier t exactly for r(n) <= t < r(p).

    n on device, p nowhere:    r(n) = 0, r(p) = 4    a hole of tiers 0, 1, 2 and 3
    n on device, p on host:    r(n) = 0, r(p) = 1    a hole of tier 0 alone
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from router.fresh_memory import LARGE_BYTES, ComingTable, FormerTable, zeros
from router.protocol.values import TIERS, HashArray, HeldState, Tier
from router.publisher import _held_kernel as kernel
from router.publisher import _held_table as table
from router.publisher._held_kernel import DONE_BITS
from router.publisher.held_invariants import check_held

Hashes: TypeAlias = HashArray | Sequence[int]

DEFAULT_MULTIPLIER = 0x9E3779B97F4A7C15
_LEAST_CAPACITY_BITS = 8
_NEVER = (1 << 64) - 1


def path_heads(block_counts: list[int], parents: list[int | None]) -> HashArray:
    """Where each of some paths begins that lie one behind the other, and behind which block, as
    kernels want it: three words each.
    """
    words: list[int] = []
    first = 0
    for blocks, parent in zip(block_counts, parents, strict=True):
        words += (first, 0, 0) if parent is None else (first, parent, 1)
        first += blocks
    return np.array(words, np.uint64)


class HeldBlocks:
    """Blocks of one rank by tier, as a set: a store of what is held and a removal of what is not do
    nothing. All changes are O(tiers) per block, also while the table grows: it moves slot by slot,
    and none of them is held up.

    `multiplier` is odd and spreads keys; a secret one keeps callers from crowding a place.

    Invariants: every block kept is held or has a held child; children are counted by their parent
    and fastest tier; holes, counts and digests equal what a walk over all blocks finds.
    """

    __slots__ = (
        "_address",
        "_coming",
        "_former",
        "_full_soon",
        "_head",
        "_header",
        "_multiplier",
        "_slots",
    )

    _coming: ComingTable[np.uint64] | None
    _former: FormerTable[np.uint64] | None
    _header: HashArray
    _slots: HashArray

    def __init__(self, multiplier: int = DEFAULT_MULTIPLIER) -> None:
        self._multiplier = multiplier
        self._head: HashArray = np.zeros(3, np.uint64)  # of a single path
        self._begin()

    @property
    def block_count(self) -> int:
        """Held blocks, once per tier."""
        return sum(self._per_tier(table.COUNTS))

    def store(self, tier: Tier, sequence_hashes: Hashes, parent: int | None) -> HashArray:
        """Hold consecutive blocks, the first of them after `parent`; those that were new.

        A block keeps the first parent that it is given.
        """
        keys = np.ascontiguousarray(sequence_hashes, dtype=np.uint64)
        self._head[1], self._head[2] = parent or 0, parent is not None
        return self.store_paths(tier, keys, self._head)

    def store_paths(self, tier: Tier, keys: HashArray, heads: HashArray) -> HashArray:
        """The same for several paths, one behind the other; `heads` as `path_heads` makes them."""
        changed, progress = np.empty(len(keys), np.uint64), 0
        while True:
            progress = kernel.store(self._address, int(tier), keys, heads, progress, changed)
            self._follow_moves()
            if self._header[table.USED] > self._full_soon:
                self._prepare()
            if progress >> DONE_BITS == len(keys):
                return changed[: progress & ((1 << DONE_BITS) - 1)]
            self._grow()

    def remove(self, tier: Tier, sequence_hashes: Hashes) -> HashArray:
        """Hold these blocks no longer; those that were held."""
        keys = np.ascontiguousarray(sequence_hashes, dtype=np.uint64)
        changed = np.empty(len(keys), np.uint64)
        return changed[: kernel.remove(self._address, int(tier), keys, changed)]

    def clear(self, tier: Tier | None = None) -> None:
        """Hold nothing in this tier; None: in any. O(blocks) where another tier holds some, else it
        frees memory and is done.
        """
        counts = self._per_tier(table.COUNTS)
        if tier is None or sum(counts) == counts[tier]:
            self._begin()
        else:
            self.remove(tier, self.held(tier))

    def held(self, tier: Tier) -> HashArray:
        """Every block held in this tier, in no order. O(capacity)."""
        hashes = np.empty(self._per_tier(table.COUNTS)[tier], np.uint64)
        if len(hashes):
            kernel.list_held(self._address, int(tier), hashes)
        return hashes

    def paths(self, tier: Tier) -> tuple[HashArray, HashArray]:
        """The same, with heads as `store_paths` takes them, of one block each. O(capacity)."""
        blocks = self._per_tier(table.COUNTS)[tier]
        told = np.empty((3, blocks), np.uint64)
        if blocks:
            kernel.list_paths(self._address, int(tier), told.reshape(-1))
        heads = np.stack([np.arange(blocks, dtype=np.uint64), told[1], told[2]], axis=1)
        return told[0], heads.ravel()

    def absent(self, tier: Tier, sequence_hashes: HashArray) -> HashArray:
        """Those of them that are not held in this tier."""
        keys = np.ascontiguousarray(sequence_hashes, dtype=np.uint64)
        out = np.empty(len(keys), np.uint64)
        return out[: kernel.absent(self._address, int(tier), keys, out)]

    def state(self, doubts: int = 0) -> HeldState:
        """Holes, counts and digests, as they travel, with these doubts."""
        holes, counts, digests = map(self._per_tier, (table.HOLES, table.COUNTS, table.DIGESTS))
        return HeldState(tuple(holes), tuple(counts), tuple(digests), doubts)  # type: ignore[arg-type]

    def _begin(self) -> None:
        self._header = np.zeros(table.HEADER_WORDS, np.uint64)
        self._address = int(self._header.ctypes.data)
        self._header[table.MULTIPLIER] = self._multiplier
        self._header[table.MOVED] = table.ALL
        self._former = None
        self._lay_out(zeros(int(table.SLOT_WORDS) << _LEAST_CAPACITY_BITS, np.uint64))

    def _lay_out(self, slots: HashArray) -> None:
        """Go on in an empty table."""
        self._slots, self._coming = slots, None
        capacity = len(slots) // int(table.SLOT_WORDS)
        most = capacity * 3 // 4
        self._header[table.PRESENT + table.FIRST] = slots.ctypes.data // 8
        self._header[table.PRESENT + table.LAST] = capacity - 1
        self._header[table.PRESENT + table.SHIFT] = 65 - capacity.bit_length()
        self._header[table.MAX_USED] = most
        self._full_soon = most * 7 // 8 if 2 * slots.nbytes >= LARGE_BYTES else _NEVER

    def _prepare(self) -> None:
        """The more of the table is in use, the more of the next one is there."""
        if self._coming is None:
            self._coming = ComingTable(2 * len(self._slots), np.uint64)
        used, most = int(self._header[table.USED]), int(self._header[table.MAX_USED])
        self._coming.touch((used - self._full_soon) / (most - self._full_soon))

    def _grow(self) -> None:
        kernel.grow(self._address)
        width, flags = int(table.SLOT_WORDS), int(table.FLAGS)
        self._former = FormerTable(self._slots, width, flags, int(self._header[table.START]))
        coming = self._coming or ComingTable(2 * len(self._slots), np.uint64)
        self._lay_out(coming.slots)

    def _follow_moves(self) -> None:
        """Give back what the former table leaves behind it."""
        if self._former is None:
            return
        moved = self._header[table.MOVED]
        if moved == table.ALL:
            self._former = None
        else:
            self._former.release(int(self._header[table.START] + moved))

    def _per_tier(self, start: np.uint64) -> list[int]:
        words: list[int] = self._header[int(start) : int(start) + TIERS].tolist()
        return words

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        check_held(self._header, self._slots, self._former)
