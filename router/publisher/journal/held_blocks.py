"""The blocks that one rank holds, kept at the edge: tiers, counts, digests, and holes.

A router can search a prompt by galloping only if the rank's blocks are closed under prefixes.
Checking that takes a count over children, which only the edge can keep cheaply, so it is kept here
and sent along. With r(n) the fastest tier that holds n (TIERS: none), the edge from parent p to n
is a hole of cumulative tier t exactly for r(n) <= t < r(p).

    n on device, p nowhere:    r(n) = 0, r(p) = 4    a hole of tiers 0, 1, 2 and 3
    n on device, p on host:    r(n) = 0, r(p) = 1    a hole of tier 0 alone
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from router.protocol.values import TIERS, HashArray, HeldState, Tier
from router.publisher.journal import _held_kernel as kernel
from router.publisher.journal import _held_table as table
from router.publisher.journal._held_kernel import DONE_BITS
from router.publisher.journal.held_invariants import check_held
from router.runtime.kernels.growing_table import GrowingTable
from router.runtime.kernels.reserved_memory import LARGE_BYTES, NextTable, zeros

Hashes: TypeAlias = HashArray | Sequence[int]

DEFAULT_MULTIPLIER = 0x9E3779B97F4A7C15
_LEAST_CAPACITY_BITS = 8
_NEVER = (1 << 64) - 1


def path_heads(block_counts: list[int], parents: list[int | None]) -> HashArray:
    """Return the heads of several paths that lie one after the other, in the kernels' form.

    A head has three words: the index of the path's first block, its parent, and 1 if it has one.
    """
    words: list[int] = []
    first = 0
    for blocks, parent in zip(block_counts, parents, strict=True):
        words += (first, 0, 0) if parent is None else (first, parent, 1)
        first += blocks
    return np.array(words, np.uint64)


class HeldBlocks:
    """The blocks of one rank by tier, as a set.

    Storing a held block and removing a block that is not held do nothing. All changes are O(tiers)
    per block, also while the table grows: slots move step by step, so that no call is delayed.

    `multiplier` is odd and spreads keys; a secret one keeps callers from causing collisions.

    Invariants: every block kept is held or has a held child; children are counted by their parent
    and fastest tier; holes, counts and digests equal those of a walk over all blocks.
    """

    __slots__ = (
        "_address",
        "_coming",
        "_full_soon",
        "_head",
        "_header",
        "_multiplier",
        "table",
    )

    _coming: NextTable[np.uint64] | None
    _header: HashArray
    table: GrowingTable

    def __init__(self, multiplier: int = DEFAULT_MULTIPLIER) -> None:
        self._multiplier = multiplier
        self._head: HashArray = np.zeros(3, np.uint64)  # The head of a single path.
        self._begin()

    @property
    def block_count(self) -> int:
        """The number of held blocks, each counted once per tier."""
        return sum(self._per_tier(table.COUNTS))

    def store(self, tier: Tier, sequence_hashes: Hashes, parent: int | None) -> HashArray:
        """Hold consecutive blocks, the first of them after `parent`. Returns those that were new.

        A block keeps the first parent it was stored with.
        """
        keys = np.ascontiguousarray(sequence_hashes, dtype=np.uint64)
        self._head[1], self._head[2] = parent or 0, parent is not None
        return self.store_paths(tier, keys, self._head)

    def store_paths(self, tier: Tier, keys: HashArray, heads: HashArray) -> HashArray:
        """Hold several paths, one after the other; `heads` as from `path_heads`.

        Returns the blocks that were new.
        """
        changed, progress = np.empty(len(keys), np.uint64), 0
        while True:
            progress = kernel.store(self._address, int(tier), keys, heads, progress, changed)
            self.table.follow_moves()
            if self._header[table.USED] > self._full_soon:
                self._prepare()
            if progress >> DONE_BITS == len(keys):
                return changed[: progress & ((1 << DONE_BITS) - 1)]
            self._grow()

    def remove(self, tier: Tier, sequence_hashes: Hashes) -> HashArray:
        """Remove blocks from a tier. Returns those that were held."""
        keys = np.ascontiguousarray(sequence_hashes, dtype=np.uint64)
        changed = np.empty(len(keys), np.uint64)
        return changed[: kernel.remove(self._address, int(tier), keys, changed)]

    def clear(self, tier: Tier | None = None) -> None:
        """Remove everything from a tier, or from all tiers if it is None.

        O(blocks) if another tier holds some; otherwise it only frees memory.
        """
        counts = self._per_tier(table.COUNTS)
        if tier is None or sum(counts) == counts[tier]:
            self._begin()
        else:
            self.remove(tier, self.held(tier))

    def held(self, tier: Tier) -> HashArray:
        """Return all blocks held in a tier, unordered. O(capacity)."""
        hashes = np.empty(self._per_tier(table.COUNTS)[tier], np.uint64)
        if len(hashes):
            kernel.list_held(self._address, int(tier), hashes)
        return hashes

    def paths(self, tier: Tier) -> tuple[HashArray, HashArray]:
        """Return all blocks held in a tier with heads, one for each block, as for `store_paths`.

        O(capacity).
        """
        blocks = self._per_tier(table.COUNTS)[tier]
        told = np.empty((3, blocks), np.uint64)
        if blocks:
            kernel.list_paths(self._address, int(tier), told.reshape(-1))
        heads = np.stack([np.arange(blocks, dtype=np.uint64), told[1], told[2]], axis=1)
        return told[0], heads.ravel()

    def absent(self, tier: Tier, sequence_hashes: HashArray) -> HashArray:
        """Return those of the blocks that are not held in a tier."""
        keys = np.ascontiguousarray(sequence_hashes, dtype=np.uint64)
        out = np.empty(len(keys), np.uint64)
        return out[: kernel.absent(self._address, int(tier), keys, out)]

    def state(self, doubts: int = 0) -> HeldState:
        """Return holes, counts and digests in the form that is published, with these doubts."""
        holes, counts, digests = map(self._per_tier, (table.HOLES, table.COUNTS, table.DIGESTS))
        return HeldState(tuple(holes), tuple(counts), tuple(digests), doubts)  # type: ignore[arg-type]

    def _begin(self) -> None:
        self._header = np.zeros(table.HEADER_WORDS, np.uint64)
        self._address = int(self._header.ctypes.data)
        self._header[table.MULTIPLIER] = self._multiplier
        slots = zeros(int(table.SLOT_WORDS) << _LEAST_CAPACITY_BITS, np.uint64)
        self.table = GrowingTable(self._header, slots, int(table.SLOT_WORDS), int(table.FLAGS))
        self._set_limits(slots)

    def _set_limits(self, slots: HashArray) -> None:
        most = len(slots) // int(table.SLOT_WORDS) * 3 // 4
        self._header[table.MAX_USED] = most
        self._full_soon = most * 7 // 8 if 2 * slots.nbytes >= LARGE_BYTES else _NEVER
        self._coming = None

    def _prepare(self) -> None:
        """Touch memory of the next table, in proportion to the use of this one."""
        if self._coming is None:
            self._coming = NextTable(2 * len(self.table.slots), np.uint64)
        used, most = int(self._header[table.USED]), int(self._header[table.MAX_USED])
        self._coming.touch((used - self._full_soon) / (most - self._full_soon))

    def _grow(self) -> None:
        kernel.grow(self._address)
        coming = self._coming or NextTable(2 * len(self.table.slots), np.uint64)
        self.table.replace(coming.slots)
        self._set_limits(coming.slots)

    def _per_tier(self, start: np.uint64) -> list[int]:
        words: list[int] = self._header[int(start) : int(start) + TIERS].tolist()
        return words

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        check_held(self._header, self.table)
