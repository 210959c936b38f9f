"""The index of a router that reads no events, or does not weigh overlap: it keeps nothing."""

# ruff: noqa: ARG002 - the arguments are the protocol's; there is nothing to do with them

from collections.abc import Iterator

from router.errors import IndexDisabledError
from router.indexer.base import (
    DONE,
    NOTHING_HELD,
    HeldBlocks,
    HeldSlice,
    HeldSummary,
    IndexStats,
    OverlapScores,
)
from router.protocol.events import EventBatch
from router.protocol.values import HashArray, PerTier, Rank, Tier


class NoneIndex:
    """Implements `Indexer`: takes every change, matches nothing, is checked by nobody. All O(1).

    `refuses_dumps`: because overlap is not weighed at all; else nothing held is the whole truth.
    """

    __slots__ = ("_refuses_dumps",)

    def __init__(self, *, refuses_dumps: bool = True) -> None:
        self._refuses_dumps = refuses_dumps

    def expect(self, ranks: int) -> None:
        """No room is needed."""

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Always True: there is no limit to be reached."""
        return True

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Always True: nothing to remove."""
        return True

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Nothing to clear."""

    def apply(self, rank: Rank, batch: EventBatch, progress: int, room_blocks: int) -> int:
        """Always DONE."""
        return DONE

    def stage(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Always True, like `store`."""
        return True

    def commit_staged(self, rank: Rank) -> None:
        """Nothing was staged."""

    def drop_staged(self, rank: Rank) -> None:
        """Nothing was staged."""

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """No search will jump."""

    def check(self, rank: Rank, expected: HeldSummary) -> None:
        """Passed over: what is not kept cannot differ, and a checkpoint would not help."""

    def take_differing(self) -> list[Rank]:
        """Always empty."""
        return []

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """Always empty."""
        return {}

    def summary(self, rank: Rank) -> HeldSummary:
        """Always that of an empty rank."""
        return NOTHING_HELD

    def dump(self) -> Iterator[HeldBlocks]:
        """Empty, or IndexDisabledError at the call: empty would say that nobody holds any."""
        if self._refuses_dumps:
            raise IndexDisabledError
        return iter(())

    def dump_slices(self) -> Iterator[HeldSlice]:
        """As `dump`."""
        self.dump()
        return iter(())

    def block_count(self) -> int:
        """Always 0."""
        return 0

    def stats(self) -> IndexStats:
        """Always that of an empty index."""
        return IndexStats()

    def sweep(self, sub_tables: int) -> bool:
        """Always False: nothing is left behind."""
        return False

    def close(self) -> None:
        """Nothing to let go of."""
