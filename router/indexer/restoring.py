"""Ranks that are filled from a dump or a snapshot, before their further events are read.

restore   dump, of another process   ─▶ degraded until the rank's checkpoint
resume    snapshot, with its cursor  ─▶ unsettled ─ all events that followed ─▶ settle: check
"""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping

from router.indexer.base import ExportedBlocks, HeldSummary, Indexer
from router.indexer.dumps import RankState
from router.indexer.healing import Resync
from router.indexer.rank_index import RankIndex
from router.indexer.slices import (
    FILL_SLICE_BLOCKS,
    SLICE_BLOCKS,
    HeldBlocks,
    Unfinished,
    stage_all,
)
from router.protocol.events import unpack_state
from router.protocol.hybrid import Layout
from router.protocol.values import Rank, Scope


class Restoring:
    """Restoration of `ranks`, slice by slice. `staged_slice_blocks`: blocks staged per slice."""

    __slots__ = (
        "_healing",
        "_indexers",
        "_ranks",
        "_unfinished",
        "_unsettled",
        "staged_slice_blocks",
    )

    def __init__(
        self,
        ranks: Mapping[Rank, RankIndex],
        indexers: Mapping[Scope, Indexer],
        unfinished: Unfinished,
        healing: Resync,
    ) -> None:
        self._ranks = ranks
        self._indexers = indexers
        self._unfinished = unfinished
        self._healing = healing
        self._unsettled: dict[Rank, None] = {}  # a dict: the order of a set varies by process
        self.staged_slice_blocks = SLICE_BLOCKS

    def forget(self, rank: Rank) -> None:
        """Forget a rank; unknown ones are ignored."""
        self._unsettled.pop(rank, None)

    def begin_fill(self) -> None:
        """Implement `TrustedIndex.begin_fill`."""
        self.staged_slice_blocks = FILL_SLICE_BLOCKS
        ranks = Counter(place.scope for place in self._ranks.values())
        for scope, indexer in self._indexers.items():
            indexer.expect(ranks[scope])

    def restore(
        self, rank: Rank, event_id: int, blocks: Iterable[ExportedBlocks], now_s: float
    ) -> bool:
        """Implement `TrustedIndex.restore`."""
        place = self._blind_place(rank)
        if place is None:
            return False
        self._unfinished[rank] = self._restored(place, rank, event_id, blocks, now_s)
        return True

    def resume(self, state: RankState, held: HeldBlocks, now_s: float) -> bool:
        """Implement `TrustedIndex.resume`."""
        place = self._blind_place(state.rank)
        if place is None or (place.scope, place.identity) != (state.scope, state.identity):
            return False
        self._unsettled[state.rank] = None
        place.is_unsettled = True
        self._unfinished[state.rank] = self._resumed(place, state, held, now_s)
        return True

    def settle(self, ranks: int, now_s: float) -> bool:
        """Implement `TrustedIndex.settle`."""
        for _ in range(min(ranks, len(self._unsettled))):
            rank = next(iter(self._unsettled))
            self._unfinished.finish(rank)
            self._settle_one(self._ranks[rank], rank, now_s)
        if not self._unsettled:
            self._end_fill()
        return bool(self._unsettled)

    def _settle_one(self, place: RankIndex, rank: Rank, now_s: float) -> None:
        summary = place.indexer.summary(rank)
        self._healing.take_differing(place.indexer, now_s)  # ignored while ranks are unsettled
        self._unsettled.pop(rank, None)
        place.is_unsettled = False
        reported = unpack_state(place.packed_state)
        if place.log.broken_reason is not None:
            return
        if summary == HeldSummary.of(reported, place.hybrid):
            place.indexer.note_holes(rank, reported.holes)
        else:
            self._healing.break_off(place, rank, now_s)

    def _end_fill(self) -> None:
        self.staged_slice_blocks = SLICE_BLOCKS
        for indexer in self._indexers.values():
            indexer.expect(0)

    def _blind_place(self, rank: Rank) -> RankIndex | None:
        """Return a rank's state if it is blind and not being filled, else None."""
        place = self._ranks.get(rank)
        is_blind = place is not None and place.log.is_blind and rank not in self._unfinished
        return place if is_blind else None

    def _restored(
        self,
        place: RankIndex,
        rank: Rank,
        event_id: int,
        blocks: Iterable[ExportedBlocks],
        now_s: float,
    ) -> Iterator[None]:
        held = ((each.tier, each.sequence_hashes) for each in blocks)
        yield from self._staged(place, rank, held, None)
        place.log.restored(event_id, now_s)

    def _resumed(
        self, place: RankIndex, state: RankState, held: HeldBlocks, now_s: float
    ) -> Iterator[None]:
        layout = None if state.hybrid is None else state.hybrid.layout
        is_kept = yield from self._staged(place, state.rank, held, layout)
        place.packed_state, place.hybrid = state.packed_state, state.hybrid
        place.log.resume(state.incarnation, state.event_id)
        if not is_kept:
            self._healing.refuse(place, now_s)

    def _staged(
        self, place: RankIndex, rank: Rank, held: HeldBlocks, layout: Layout | None
    ) -> Generator[None, None, bool]:
        """Replace all that the rank holds by these blocks. Returns False if some found no room."""
        is_kept = yield from stage_all(place.indexer, rank, held, self.staged_slice_blocks)
        place.indexer.commit_staged(rank, layout)
        return is_kept
