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

from router.protocol.values import FASTEST_TIER, TIERS, HashArray, HeldState, Tier
from router.publisher._held_kernel import (
    CAPACITY,
    CHILDREN,
    COUNTS,
    DIGESTS,
    DONE_BITS,
    FLAGS,
    HAS_PARENT,
    HEADER_WORDS,
    HOLES,
    KEY,
    MASK,
    MAX_USED,
    MULTIPLIER,
    PARENT,
    SHIFT,
    SLOT_WORDS,
    SLOTS,
    USED,
    absent,
    list_held,
    list_paths,
    move_in,
    remove,
    store,
)
from router.sequence.digest import digest

Hashes: TypeAlias = HashArray | Sequence[int]

DEFAULT_MULTIPLIER = 0x9E3779B97F4A7C15
_MIN_CAPACITY_BITS = 8


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
    nothing. All changes are O(tiers) per block; a table that fills up is copied into one twice the
    size, which holds its caller up for about 20 ns a block.

    `multiplier` is odd and spreads keys; a secret one keeps callers from crowding a place. A table
    for `expected_blocks` does not grow before it holds them, and takes memory as they come.

    Invariants: every block kept is held or has a held child; children are counted by their parent
    and fastest tier; holes, counts and digests equal what a walk over all blocks finds.
    """

    __slots__ = ("_address", "_first_bits", "_head", "_header", "_multiplier", "_slots")

    _header: HashArray
    _slots: HashArray

    def __init__(self, multiplier: int = DEFAULT_MULTIPLIER, expected_blocks: int = 0) -> None:
        self._multiplier = multiplier
        self._first_bits = max(_MIN_CAPACITY_BITS, (expected_blocks * 4 // 3).bit_length())
        self._head: HashArray = np.zeros(3, np.uint64)  # of a single path
        self._begin()

    @property
    def block_count(self) -> int:
        """Held blocks, once per tier."""
        return sum(self._per_tier(COUNTS))

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
            progress = store(self._address, int(tier), keys, heads, progress, changed)
            if progress >> DONE_BITS == len(keys):
                return changed[: progress & ((1 << DONE_BITS) - 1)]
            self._grow()

    def remove(self, tier: Tier, sequence_hashes: Hashes) -> HashArray:
        """Hold these blocks no longer; those that were held."""
        keys = np.ascontiguousarray(sequence_hashes, dtype=np.uint64)
        changed = np.empty(len(keys), np.uint64)
        return changed[: remove(self._address, int(tier), keys, changed)]

    def clear(self, tier: Tier | None = None) -> None:
        """Hold nothing in this tier; None: in any. Frees memory only where nothing is left."""
        if tier is not None:
            self.remove(tier, self.held(tier))
        if tier is None or not self.block_count:
            self._begin()

    def held(self, tier: Tier) -> HashArray:
        """Every block held in this tier, in no order. O(capacity)."""
        hashes = np.empty(self._per_tier(COUNTS)[tier], np.uint64)
        if len(hashes):
            list_held(self._address, int(tier), hashes)
        return hashes

    def paths(self, tier: Tier) -> tuple[HashArray, HashArray]:
        """The same, with heads as `store_paths` takes them, of one block each. O(capacity)."""
        blocks = self._per_tier(COUNTS)[tier]
        told = np.empty((3, blocks), np.uint64)
        if blocks:
            list_paths(self._address, int(tier), told.reshape(-1))
        heads = np.stack([np.arange(blocks, dtype=np.uint64), told[1], told[2]], axis=1)
        return told[0], heads.ravel()

    def absent(self, tier: Tier, sequence_hashes: HashArray) -> HashArray:
        """Those of them that are not held in this tier."""
        keys = np.ascontiguousarray(sequence_hashes, dtype=np.uint64)
        out = np.empty(len(keys), np.uint64)
        return out[: absent(self._address, int(tier), keys, out)]

    def state(self, doubts: int = 0) -> HeldState:
        """Holes, counts and digests, as they travel, with these doubts."""
        holes, counts, digests = map(self._per_tier, (HOLES, COUNTS, DIGESTS))
        return HeldState(tuple(holes), tuple(counts), tuple(digests), doubts)  # type: ignore[arg-type]

    def _begin(self) -> None:
        self._header = np.zeros(HEADER_WORDS, np.uint64)
        self._address = int(self._header.ctypes.data)
        self._header[MULTIPLIER] = self._multiplier
        self._lay_out(self._first_bits)

    def _lay_out(self, capacity_bits: int) -> None:
        capacity = 1 << capacity_bits
        self._slots = np.zeros(capacity * int(SLOT_WORDS), np.uint64)
        self._header[SLOTS] = self._slots.ctypes.data
        self._header[CAPACITY] = capacity
        self._header[SHIFT] = 64 - capacity_bits
        self._header[MAX_USED] = capacity * 3 // 4

    def _grow(self) -> None:
        old = self._slots
        self._lay_out(int(self._header[CAPACITY]).bit_length())
        move_in(self._address, old)

    def _per_tier(self, start: np.uint64) -> list[int]:
        words: list[int] = self._header[int(start) : int(start) + TIERS].tolist()
        return words

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        self._check_places()
        rows = {row[KEY]: row for row in self._rows() if row[FLAGS]}
        fastest = {key: FASTEST_TIER[row[FLAGS] & int(MASK)] for key, row in rows.items()}
        children = {key: [0] * TIERS for key in rows}
        holes = [0] * TIERS
        for key, row in rows.items():
            if fastest[key] < TIERS and row[FLAGS] & int(HAS_PARENT):
                children[row[PARENT]][fastest[key]] += 1
                for hole in range(fastest[key], fastest[row[PARENT]]):
                    holes[hole] += 1
        for key, row in rows.items():
            words = np.array(row[CHILDREN:FLAGS], np.uint64)
            assert words.view(np.uint32).tolist() == children[key]
            assert fastest[key] < TIERS or any(children[key])
        assert holes == self._per_tier(HOLES)
        for tier in Tier:
            held = [key for key, row in rows.items() if row[FLAGS] >> tier & 1]
            assert sorted(held) == sorted(self.held(tier).tolist())
            assert len(held) == self._per_tier(COUNTS)[tier]
            assert digest(np.array(held, np.uint64)) == self._per_tier(DIGESTS)[tier]

    def _check_places(self) -> None:
        """No key is there twice, and no gap lies between a key's home and its slot."""
        rows, shift = self._rows(), int(self._header[SHIFT])
        used = [position for position, row in enumerate(rows) if row[FLAGS]]
        assert len(used) == self._header[USED] <= self._header[MAX_USED]
        assert len({rows[position][KEY] for position in used}) == len(used)
        for position in used:
            home = (rows[position][KEY] * self._multiplier & (1 << 64) - 1) >> shift
            while home != position:
                assert rows[home][FLAGS]
                home = (home + 1) % len(rows)

    def _rows(self) -> list[list[int]]:
        rows: list[list[int]] = self._slots.reshape(-1, int(SLOT_WORDS)).tolist()
        return rows
