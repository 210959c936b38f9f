"""An exact radix tree, stored flat.

A node's key is the hash of its whole path, so the node at position i is one look-up away, and there
are no parent links to walk or to keep right:

    sequence hash ──▶ reference ──▶ one holder, or an interned set of them, each with a tier mask
    rank ──▶ holder id ──▶ counts, digests, masks

A holder is a rank in one life. Clearing a rank retires its id: matching no longer sees it, a sweep
strips it from the slots later, and only then is the id used again. The nodes, sets and holders live
in arrays (`_memory`) that numba kernels work on (`_kernel`).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from router.errors import WireError
from router.indexer import _kernel, _sets, _table
from router.indexer._kernel import MALFORMED, PROGRESS_BITS
from router.indexer._memory import SUB_BITS, Memory
from router.indexer.base import (
    REFUSED,
    HeldBlocks,
    HeldSlice,
    HeldSummary,
    IndexStats,
    OverlapScores,
)
from router.indexer.grouping import blocks_by_rank
from router.indexer.holders import Holders
from router.indexer.invariants import check_radix_tree
from router.indexer.matches import ROW_BYTES, Matches
from router.protocol.events import CLEARED, EventBatch, cleared_tier_at
from router.protocol.values import HashArray, PerTier, Rank, Tier

DEFAULT_MAX_BLOCKS = 1 << 25
MULTIPLIER = 0x9E3779B97F4A7C15
CHECK_INTERVAL = 1000

_COUNT = _sets.BLOCK_TABLE + int(_table.COUNT)
_MAX_COUNT = _sets.BLOCK_TABLE + int(_table.MAX_COUNT)
_SET_COUNT = _sets.SET_TABLE + int(_table.COUNT)
_EXPECTED = _sets.BLOCK_TABLE + int(_table.EXPECTED)
_EXPECTED_UNIT = 17
"""Sixteenths of what is expected: a little more, for the fullest sub-tables not to grow again."""

_EXPECTED_MOST = 1 << 20
_SWEEP_SLICE = 64

DUMP_ROWS = 8192
"""Rows read without a pause, 10 ns each; a sub-table, however empty, counts as some more."""

_SUB_TABLE_ROWS = 64


class RadixTree:
    """The exact index; implements `Indexer`.

    `multiplier` is odd and spreads keys; a secret one keeps callers from crowding a sub-table. One
    answer in `check_interval` that jumped over blocks is checked by looking at each of them.
    """

    __slots__ = (
        "_address",
        "_cursor",
        "_differing",
        "_ends",
        "_expected_ranks",
        "_holders",
        "_memory",
        "_state",
        "_sub_tables",
    )

    def __init__(
        self,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        *,
        multiplier: int = MULTIPLIER,
        check_interval: int = CHECK_INTERVAL,
        sub_bits: int = SUB_BITS,
    ) -> None:
        self._memory = Memory(max_blocks, multiplier, check_interval, sub_bits)
        self._address = self._memory.address
        self._ends = self._memory.ends.data.cast("B")
        self._state = self._memory.state
        self._holders = Holders(self._memory.holders)
        self._sub_tables = 1 << sub_bits
        self._cursor = 0
        self._differing: list[Rank] = []
        self._expected_ranks = 0

    def expect(self, ranks: int) -> None:
        """Grow from now on for so many ranks, as if all held as much as those known; see `Indexer`.

        Sub-tables still grow one by one, when they are full; 0: by a quarter, as ever.
        """
        self._expected_ranks = ranks
        self._note_expected()

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Note that the rank holds these blocks in this tier. O(blocks named)."""
        holder = self._holder(rank)
        if holder is None:
            return False
        return _kernel.store(self._address, holder, int(tier), sequence_hashes) == len(
            sequence_hashes
        )

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Note that it no longer does; blocks it does not hold there are passed over."""
        if rank not in self._holders.ids:
            return True
        holder = self._holder(rank)
        if holder is None:
            return False
        return _kernel.remove(self._address, holder, int(tier), sequence_hashes) == len(
            sequence_hashes
        )

    def apply(self, rank: Rank, batch: EventBatch, progress: int, room_blocks: int) -> int:
        """Apply a batch's events from a progress on; see `Indexer`. O(blocks applied)."""
        packed = batch.packed
        event_count = batch.last_event_id - batch.first_event_id + 1
        while True:
            holder = self._holders.ids.get(rank)
            if holder is None or self._holders.unswept:
                holder = self._holder(rank)
                if holder is None:
                    return REFUSED
            reached = _kernel.apply(
                self._address, holder, packed, event_count, progress, room_blocks
            )
            if reached == MALFORMED:
                raise WireError(f"{rank}: {event_count} events in a malformed string of bytes")
            if reached < 0:
                return reached
            offset = reached >> PROGRESS_BITS << 3
            if packed[offset] != CLEARED:
                return reached
            self.clear(rank, cleared_tier_at(packed, offset))
            progress = reached + (1 << PROGRESS_BITS)

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Note that the rank holds nothing in this tier; None: in any. O(1), swept later.

        A tier that is cleared while others are not has to be swept before the rank's next change.
        """
        self._holders.clear(rank, tier)

    def stage(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Collect blocks that will replace all that the rank holds; not visible yet."""
        holder = self._holders.stage(rank)
        if holder is None:
            return False
        return _kernel.store(self._address, holder, int(tier), sequence_hashes) == len(
            sequence_hashes
        )

    def commit_staged(self, rank: Rank) -> None:
        """What was staged is now what the rank holds, and nothing else. O(1)."""
        self.clear(rank)
        holder = self._holders.staged.pop(rank, None)
        if holder is not None:
            self._show(holder, rank)

    def drop_staged(self, rank: Rank) -> None:
        """Forget what was staged. O(1)."""
        self._holders.drop_staged(rank)

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """Note in which cumulative tiers searches may jump; see `Indexer`."""
        self._holders.note_holes(rank, holes)

    def check(self, rank: Rank, expected: HeldSummary) -> None:
        """Compare what the rank holds now with this; the outcome is in `take_differing`."""
        if self.summary(rank) != expected:
            self._differing.append(rank)

    def take_differing(self) -> list[Rank]:
        """Ranks that a check found to differ since the last call."""
        if not self._differing:
            return []
        differing, self._differing = self._differing, []
        return differing

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """The longest held prefix of a prompt, per rank and cumulative tier.

        O(log blocks) look-ups per distinct end where no rank that matches may have holes, else one
        per block; counts itself, and otherwise mutates nothing.
        """
        return self.matches(_kernel.find(self._address, sequence_hashes))

    @property
    def address(self) -> int:
        """For kernels that search on their way, as `find_matches` does."""
        return self._address

    @property
    def rank_of(self) -> Sequence[Rank]:
        """The rank of each holder id, as in `Matches`."""
        return self._holders.rank_of

    def matches(self, rows: int) -> Matches:
        """What the last search has found: so many rows."""
        return Matches(self._holders.rank_of, self._ends[: rows * ROW_BYTES].tobytes())

    def summary(self, rank: Rank) -> HeldSummary:
        """Count and digest of what the rank holds. O(1)."""
        return self._holders.summary(rank)

    def dump(self) -> Iterator[HeldBlocks]:
        """Everything held, by rank and tier, without empty entries. O(blocks held)."""
        return blocks_by_rank(list(self.dump_slices()))

    def dump_slices(self) -> Iterator[HeldSlice]:
        """Everything held in slices, between which the index may change; see `Indexer`."""
        rank_of = {holder: rank for rank, holder in self._holders.ids.items()}
        parts, room = [], DUMP_ROWS
        for sub_table in range(self._sub_tables):
            parts.append(_kernel.export(self._address, sub_table))
            room -= len(parts[-1]) + _SUB_TABLE_ROWS
            if room <= 0 or sub_table == self._sub_tables - 1:
                yield HeldSlice(rank_of, np.concatenate(parts))
                parts, room = [], DUMP_ROWS

    def block_count(self) -> int:
        """Distinct blocks kept, those of cleared ranks included until they are swept. O(1)."""
        return int(self._state[_COUNT])

    def stats(self) -> IndexStats:
        """How full the index is, and how its self-checks ended. O(1)."""
        return IndexStats(
            blocks=self.block_count(),
            max_blocks=int(self._state[_MAX_COUNT]),
            holder_sets=int(self._state[_SET_COUNT]),
            unswept_holders=len(self._holders.unswept),
            checked_answers=int(self._state[_sets.CHECKED]),
            differing_answers=int(self._state[_sets.DIFFERED]),
        )

    def sweep(self, sub_tables: int) -> bool:
        """Free a slice of what cleared ranks left behind; False once nothing is left to do."""
        if not self._holders.unswept:
            return False
        for _ in range(sub_tables):
            _kernel.sweep(self._address, self._cursor)
            self._cursor = (self._cursor + 1) % self._sub_tables
        self._holders.release_swept()
        return bool(self._holders.unswept)

    def close(self) -> None:
        """Nothing to let go of."""

    def check_invariants(self) -> None:
        """Assert all that this module and those below it promise. O(everything)."""
        check_radix_tree(self)

    def _holder(self, rank: Rank) -> int | None:
        """The rank's holder id, ready for changes, if need be a new one; None: there is no room."""
        holders = self._holders
        holder = holders.ids.get(rank)
        if holder is None:
            holder = holders.take()
            if holder is not None:
                self._show(holder, rank)
        elif holder in holders.unswept and not self._sweep_holder(holder):
            return None
        return holder

    def _sweep_holder(self, holder: int) -> bool:
        """Strip the slots of what the holder no longer keeps; False: there was no room for it."""
        for _ in range(0, self._sub_tables, _SWEEP_SLICE):
            self.sweep(_SWEEP_SLICE)
            if holder not in self._holders.unswept:
                return True
        return False

    def _show(self, holder: int, rank: Rank) -> None:
        self._holders.show(holder, rank)
        if self._expected_ranks:
            self._note_expected()

    def _note_expected(self) -> None:
        """What the tree holds comes from the ranks known so far; the others will add their part."""
        known, wanted = max(len(self._holders.ids), 1), self._expected_ranks
        growth = _EXPECTED_UNIT * wanted // known if wanted > known else 0
        self._state[_EXPECTED] = min(growth, _EXPECTED_MOST)
