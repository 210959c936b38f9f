"""An exact radix tree, stored flat.

A node's key is the hash of its whole path, so the node at position i is found by one look-up, and
there are no parent links to follow or maintain:

    sequence hash ──▶ reference ──▶ one holder, or an interned set of them, each with a tier mask
    rank ──▶ holder id ──▶ counts, digests, masks

A holder is one incarnation of a rank. Clearing a rank retires its id: matching no longer sees it, a
sweep removes it from the slots later, and only then is the id reused. The nodes, sets and holders
are arrays (`_memory`) that numba kernels work on (`_kernel`).
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from router.errors import WireError
from router.indexer.base import (
    DEFAULT_MAX_BLOCKS,
    DIFFERENT,
    DONE,
    REFUSED,
    ExportedBlocks,
    HeldSlice,
    HeldSummary,
    IndexStats,
    OverlapScores,
    SearchedTree,
)
from router.indexer.radix_tree import (
    _block_table,
    _holder_sets,
    _resume_kernel,
    _tree_kernel,
)
from router.indexer.radix_tree._memory import SUB_BITS, Memory
from router.indexer.radix_tree._tree_kernel import MALFORMED, PROGRESS_BITS
from router.indexer.radix_tree.class_plane import ClassPlane
from router.indexer.radix_tree.holders import Holders
from router.indexer.radix_tree.invariants import check_radix_tree
from router.indexer.radix_tree.matches import ROW_BYTES, Matches, blocks_by_rank
from router.protocol.events import CLEARED, ClassCleared, Cleared, EventBatch, cleared_at
from router.protocol.hybrid import HybridState, Layout
from router.protocol.values import TIERS, HashArray, PerTier, Rank, Tier

MULTIPLIER = 0x9E3779B97F4A7C15
CHECK_INTERVAL = 1000

_COUNT = _holder_sets.BLOCK_TABLE + int(_block_table.COUNT)
_MAX_COUNT = _holder_sets.BLOCK_TABLE + int(_block_table.MAX_COUNT)
_MULTIPLIER = _holder_sets.BLOCK_TABLE + int(_block_table.MULTIPLIER)
_SET_COUNT = _holder_sets.SET_TABLE + int(_block_table.COUNT)
_EXPECTED = _holder_sets.BLOCK_TABLE + int(_block_table.EXPECTED)
_EXPECTED_UNIT = 17
"""Sixteenths per unit of growth: a margin, so that the fullest sub-tables need not grow again."""

_EXPECTED_MOST = 1 << 20
_SWEEP_SLICE = 64

CLASS_SUB_BITS = 10
"""Fewer sub-tables for the blocks of classes: there are few, and a sub-table takes a page."""

DUMP_ROWS = 8192
"""Rows read without a pause, at 10 ns each; a sub-table counts as `_SUB_TABLE_ROWS` more."""

_SUB_TABLE_ROWS = 64


class RadixTree:
    """The exact index; implements `Indexer`.

    `multiplier` is odd and spreads keys; a secret one keeps callers from crowding a sub-table. One
    search in `check_interval` that jumped over blocks is verified by examining each block.

    `memory` and `holders` are its arrays and the ids of its ranks; only the tree changes them.
    `address`: that of its state; `trees`: this tree, as `Indexer` has it. `classes`: what hybrid
    ranks hold beside full attention; None before the first of them.
    """

    __slots__ = (
        "_cursor",
        "_differing",
        "_ends",
        "_state",
        "_sub_tables",
        "address",
        "classes",
        "expected_ranks",
        "holders",
        "memory",
        "trees",
    )

    def __init__(
        self,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        *,
        multiplier: int = MULTIPLIER,
        check_interval: int = CHECK_INTERVAL,
        sub_bits: int = SUB_BITS,
    ) -> None:
        self.memory = Memory(max_blocks, multiplier, check_interval, sub_bits)
        self.address = self.memory.address
        self._ends = self.memory.ends.data.cast("B")
        self._state = self.memory.state
        self.holders = Holders(self.memory.holders)
        self.trees = (SearchedTree(self.address, self.holders),)
        self._sub_tables = 1 << sub_bits
        self._cursor = 0
        self._differing: list[Rank] = []
        self.expected_ranks = 0
        self.classes: ClassPlane | None = None

    def expect(self, ranks: int) -> None:
        """Grow from now on for `ranks` ranks that hold as much as the known ones; see `Indexer`.

        Sub-tables still grow one by one, when they are full; 0: by a quarter, the default, and
        always so in the sparse table of classes.
        """
        self.expected_ranks = ranks
        self._note_expected()

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Record that the rank holds these blocks in this tier. O(blocks named)."""
        holder = self.ready(rank)
        if holder is None:
            return False
        return _tree_kernel.store(self.address, holder, int(tier), sequence_hashes) == len(
            sequence_hashes
        )

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Remove these blocks of the rank from this tier; blocks it does not hold are ignored."""
        if rank not in self.holders.ids:
            return True
        holder = self.ready(rank)
        if holder is None:
            return False
        return _tree_kernel.remove(self.address, holder, int(tier), sequence_hashes) == len(
            sequence_hashes
        )

    def apply(self, rank: Rank, batch: EventBatch, progress: int, room_blocks: int) -> int:
        """Apply a batch's events from `progress` on; see `Indexer`. O(blocks applied)."""
        packed, hybrid = batch.packed, batch.hybrid
        event_count = batch.last_event_id - batch.first_event_id + 1
        while True:
            holder = self.holders.ids.get(rank)
            has_classes = hybrid is not None or self.classes is not None
            if holder is None or self.holders.unswept or has_classes:
                holder = self._prepared(rank, hybrid)
                if holder is None:
                    return REFUSED
            reached = _tree_kernel.apply(
                self.address, holder, packed, event_count, progress, room_blocks
            )
            if reached == MALFORMED:
                raise WireError(f"{rank}: {event_count} events in a malformed string of bytes")
            if reached == DONE and hybrid is not None:
                is_equal = self.summary(rank) == HeldSummary.of(batch.state, hybrid)
                return DONE if is_equal else DIFFERENT
            offset = reached >> PROGRESS_BITS << 3
            if reached < 0 or packed[offset] != CLEARED:
                return reached
            self._clear(rank, cleared_at(packed, offset))
            progress = reached + (1 << PROGRESS_BITS)

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Remove all blocks of the rank from this tier; None: all, and the layout. O(1); see below.

        If only some tiers are cleared, the tier must be swept before the rank's next change.
        """
        self.holders.clear(rank, tier)
        if tier is None and self.classes is not None:
            self.classes.forget(rank)

    def stage(self, rank: Rank, place: int, sequence_hashes: HashArray) -> bool:
        """Collect blocks that will replace all that the rank holds; not visible yet."""
        if place >= TIERS:
            return self._class_plane().stage(rank, place - TIERS, sequence_hashes)
        holder = self.holders.stage(rank)
        if holder is None:
            return False
        return _tree_kernel.store(self.address, holder, place, sequence_hashes) == len(
            sequence_hashes
        )

    def commit_staged(self, rank: Rank, layout: Layout | None = None) -> None:
        """Replace all that the rank holds by the staged blocks. O(1)."""
        self.clear(rank)
        holder = self.holders.staged.pop(rank, None)
        if holder is not None:
            self._show(holder, rank)
        if layout is not None:
            self._class_plane().commit_staged(rank, layout)
        elif self.classes is not None:
            self.classes.tree.drop_staged(rank)

    def drop_staged(self, rank: Rank) -> None:
        """Drop the staged blocks. O(1)."""
        self.holders.drop_staged(rank)
        if self.classes is not None:
            self.classes.tree.drop_staged(rank)

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """Record in which cumulative tiers searches may jump; see `Indexer`."""
        self.holders.note_holes(rank, holes)

    def check(self, rank: Rank, expected: HeldSummary) -> None:
        """Compare what the rank holds now with this; the result is in `take_differing`."""
        if self.summary(rank) != expected:
            self._differing.append(rank)

    def take_differing(self) -> list[Rank]:
        """Return, and clear, the ranks that checks found to differ since the last call."""
        if not self._differing:
            return []
        differing, self._differing = self._differing, []
        return differing

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """Return the longest held prefix of a prompt, per rank and cumulative tier.

        O(log blocks) look-ups per distinct end if no matching rank may have holes, else one per
        block. Mutates nothing but search counters.
        """
        rows = _tree_kernel.find(self.address, sequence_hashes)
        return Matches(self.holders.rank_of, self._ends[: rows * ROW_BYTES].tobytes())

    def resumable(
        self, sequence_hashes: HashArray, isl_tokens: int, block_size: int
    ) -> OverlapScores:
        """Return the prefix of a prompt that ranks need not compute again; see `Indexer`.

        With hybrid ranks at most one more look-up per block and layout.
        """
        if self.classes is None:  # a kernel with two more arguments takes 0.1 µs longer
            rows = _tree_kernel.find(self.address, sequence_hashes)
        else:
            rows = _resume_kernel.find_resumable(
                self.address, sequence_hashes, isl_tokens, block_size
            )
        return Matches(self.holders.rank_of, self._ends[: rows * ROW_BYTES].tobytes())

    def summary(self, rank: Rank) -> HeldSummary:
        """Return the number and digest of the rank's blocks. O(1)."""
        summary = self.holders.summary(rank)
        if self.classes is None or rank not in self.classes.layouts:
            return summary
        of_classes = self.classes.tree.summary(rank)
        return HeldSummary(summary.counts, summary.digests, of_classes.counts, of_classes.digests)

    def dump(self) -> Iterator[ExportedBlocks]:
        """Yield all held blocks, by rank and tier, without empty entries. O(blocks held)."""
        return blocks_by_rank(list(self.dump_slices()))

    def dump_slices(self) -> Iterator[HeldSlice]:
        """Yield all held blocks in slices; the index may change in between; see `Indexer`."""
        rank_of = {holder: rank for rank, holder in self.holders.ids.items()}
        parts, room = [], DUMP_ROWS
        for sub_table in range(self._sub_tables):
            parts.append(self._export(sub_table))
            room -= len(parts[-1]) + _SUB_TABLE_ROWS
            if room <= 0 or sub_table == self._sub_tables - 1:
                yield HeldSlice(rank_of, np.concatenate(parts))
                parts, room = [], DUMP_ROWS

    def _export(self, sub_table: int) -> npt.NDArray[np.uint64]:
        held: npt.NDArray[np.uint64] = np.empty((_SUB_TABLE_ROWS, 2), np.uint64)
        rows = _tree_kernel.export(self.address, sub_table, held)
        if rows < 0:
            held = np.empty((-rows, 2), np.uint64)
            rows = _tree_kernel.export(self.address, sub_table, held)
        return held[:rows]

    def dump_class_slices(self) -> Iterator[HeldSlice]:
        """Yield the blocks of hybrid ranks' classes like `dump_slices`, class c as tier c."""
        if self.classes is not None:
            yield from self.classes.tree.dump_slices()

    def block_count(self) -> int:
        """Return the number of distinct blocks, including those not yet swept. O(1)."""
        return int(self._state[_COUNT])

    def stats(self) -> IndexStats:
        """Return the size of the index and the results of its self-checks. O(1)."""
        return IndexStats(
            blocks=self.block_count(),
            max_blocks=int(self._state[_MAX_COUNT]),
            class_blocks=0 if self.classes is None else self.classes.tree.block_count(),
            holder_sets=int(self._state[_SET_COUNT]),
            unswept_holders=len(self.holders.unswept),
            checked_answers=int(self._state[_holder_sets.CHECKED]),
            differing_answers=int(self._state[_holder_sets.DIFFERED]),
        )

    def sweep(self, sub_tables: int) -> bool:
        """Free a slice of the blocks of cleared ranks. Returns False once nothing is left."""
        is_left = self.classes is not None and self.classes.tree.sweep(sub_tables)
        if not self.holders.unswept:
            return is_left
        for _ in range(sub_tables):
            _tree_kernel.sweep(self.address, self._cursor)
            self._cursor = (self._cursor + 1) % self._sub_tables
        self.holders.release_swept()
        return is_left or bool(self.holders.unswept)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def check_invariants(self) -> None:
        """Assert the invariants of this module and those below it. O(size of the tree)."""
        check_radix_tree(self.memory, self.holders)
        if self.classes is not None:
            self.classes.check_invariants()

    def ready(self, rank: Rank) -> int | None:
        """Return the rank's holder id, new if need be, ready for changes; None if no room."""
        holders = self.holders
        holder = holders.ids.get(rank)
        if holder is None:
            holder = holders.take()
            if holder is not None:
                self._show(holder, rank)
        elif holder in holders.unswept and not self._sweep_holder(holder):
            return None
        return holder

    def _sweep_holder(self, holder: int) -> bool:
        """Remove from the slots the tiers that the holder does not keep. Returns False if full."""
        for _ in range(0, self._sub_tables, _SWEEP_SLICE):
            self.sweep(_SWEEP_SLICE)
            if holder not in self.holders.unswept:
                return True
        return False

    def _prepared(self, rank: Rank, hybrid: HybridState | None) -> int | None:
        """Return the rank's holder id, ready for a batch with these classes; None if no room."""
        holder = self.ready(rank)
        if hybrid is not None:
            return holder if self._class_plane().prepare(rank, hybrid.layout) else None
        if self.classes is not None:
            self.classes.forget(rank)
        return holder

    def _clear(self, rank: Rank, event: Cleared | ClassCleared) -> None:
        """Apply an event; unlike `clear`, it leaves the rank its layout."""
        if isinstance(event, Cleared):
            self.holders.clear(rank, event.tier)
            if event.tier is None and self.classes is not None:
                self.classes.clear(rank)
        elif self.classes is not None:
            self.classes.clear(rank, event.class_index)

    def _class_plane(self) -> ClassPlane:
        """Return the plane of classes, made with the first hybrid rank."""
        if self.classes is None:
            max_blocks, multiplier = int(self._state[_MAX_COUNT]), int(self._state[_MULTIPLIER])
            sub_bits = min(CLASS_SUB_BITS, self._sub_tables.bit_length() - 1)
            tree = RadixTree(max_blocks, multiplier=multiplier, sub_bits=sub_bits)
            self.classes = ClassPlane(self._state, self.holders, tree)
        return self.classes

    def _show(self, holder: int, rank: Rank) -> None:
        self.holders.show(holder, rank)
        if self.classes is not None:
            self.classes.link(rank)
        if self.expected_ranks:
            self._note_expected()

    def _note_expected(self) -> None:
        """Estimate growth: known ranks hold all present blocks; the others will add their share."""
        known, wanted = max(len(self.holders.ids), 1), self.expected_ranks
        growth = _EXPECTED_UNIT * wanted // known if wanted > known else 0
        self._state[_EXPECTED] = min(growth, _EXPECTED_MOST)
