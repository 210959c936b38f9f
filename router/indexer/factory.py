"""The choice of an index by the settings, and the index that stores nothing."""

from collections.abc import Iterator

from msgspec import Struct

from router.indexer.base import (
    DONE,
    NOTHING_HELD,
    ExportedBlocks,
    HeldSlice,
    HeldSummary,
    Indexer,
    IndexMode,
    IndexStats,
    OverlapScores,
    SearchedTree,
)
from router.indexer.concurrent import ConcurrentIndex
from router.indexer.errors import IndexDisabledError
from router.indexer.radix_tree.radix_tree import MULTIPLIER, RadixTree
from router.protocol.events import EventBatch
from router.protocol.hybrid import Layout
from router.protocol.values import HashArray, PerTier, Rank, Tier

# ruff: noqa: ARG002 - the arguments belong to the protocol; this index does not use them


class DisabledIndex:
    """A disabled index; implements `Indexer`: accepts every change, matches nothing. All O(1).

    `refuses_dumps`: True if overlap has no weight; otherwise an empty dump is correct.
    """

    __slots__ = ("_refuses_dumps",)
    trees: tuple[SearchedTree, ...] = ()

    def __init__(self, *, refuses_dumps: bool = True) -> None:
        self._refuses_dumps = refuses_dumps

    def expect(self, ranks: int) -> None:
        """Do nothing: no room is needed."""

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Return True: there is no limit."""
        return True

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Return True: there is nothing to remove."""
        return True

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Do nothing: there is nothing to clear."""

    def apply(self, rank: Rank, batch: EventBatch, progress: int, room_blocks: int) -> int:
        """Return DONE."""
        return DONE

    def stage(self, rank: Rank, place: int, sequence_hashes: HashArray) -> bool:
        """Return True, like `store`."""
        return True

    def commit_staged(self, rank: Rank, layout: Layout | None = None) -> None:
        """Do nothing: no blocks are staged."""

    def drop_staged(self, rank: Rank) -> None:
        """Do nothing: no blocks are staged."""

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """Do nothing: no search jumps."""

    def check(self, rank: Rank, expected: HeldSummary) -> None:
        """Do nothing: an index without contents would differ, and a checkpoint would not help."""

    def take_differing(self) -> list[Rank]:
        """Return an empty list."""
        return []

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """Return no overlaps."""
        return {}

    def resumable(
        self, sequence_hashes: HashArray, isl_tokens: int, block_size: int
    ) -> OverlapScores:
        """Return no overlaps."""
        return {}

    def summary(self, rank: Rank) -> HeldSummary:
        """Return the summary of an empty rank."""
        return NOTHING_HELD

    def dump(self) -> Iterator[ExportedBlocks]:
        """Return nothing. Raises IndexDisabledError at once if an empty dump would mislead."""
        if self._refuses_dumps:
            raise IndexDisabledError
        return iter(())

    def dump_slices(self) -> Iterator[HeldSlice]:
        """Return nothing, or raise, like `dump`."""
        self.dump()
        return iter(())

    def dump_class_slices(self) -> Iterator[HeldSlice]:
        """Return nothing."""
        return iter(())

    def stats(self) -> IndexStats:
        """Return the figures of an empty index."""
        return IndexStats()

    def sweep(self, sub_tables: int) -> bool:
        """Return False: nothing is left to free."""
        return False

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class IndexSettings(Struct, frozen=True):
    """Settings of the index.

    `event_threads`: shards that are changed in parallel; they share `max_blocks` in equal parts.
    `multiplier` is that of the radix trees.
    """

    overlap_score_weight: float
    use_kv_events: bool
    event_threads: int
    max_blocks: int
    multiplier: int = MULTIPLIER


def index_mode(settings: IndexSettings) -> IndexMode:
    """Return the source of the knowledge about caches."""
    if not settings.overlap_score_weight > 0:
        return IndexMode.NONE
    return IndexMode.EVENTS if settings.use_kv_events else IndexMode.APPROXIMATE


def make_indexer(settings: IndexSettings) -> Indexer:
    """Return the index that events are applied to; a disabled one if they do not count."""
    mode = index_mode(settings)
    if mode is not IndexMode.EVENTS:
        return DisabledIndex(refuses_dumps=mode is IndexMode.NONE)
    threads = settings.event_threads
    max_blocks = -(-settings.max_blocks // threads)

    def make_tree() -> RadixTree:
        return RadixTree(max_blocks, multiplier=settings.multiplier)

    return ConcurrentIndex(make_tree, threads) if threads > 1 else make_tree()
