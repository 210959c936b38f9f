"""Estimated blocks beside, or instead of, those reported by events: one index per scope."""

from collections.abc import Iterator

from router.indexer.approximate import ApproximateIndex, ApproximateLimits, merge_maximum
from router.indexer.base import HeldSlice, OverlapScores, SearchedTree
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.values import HashArray, Rank, Scope

SLICE_BLOCKS = 512
SLICE_SUB_TABLES = 64


class Predictions:
    """Blocks that recently booked prompts are expected to leave in the caches; none if no limits.

    `are_made`: True if blocks are estimated. `refused_prompts`: the number of prompts that found
    no room.
    """

    __slots__ = ("_indexes", "_limits", "are_made", "refused_prompts")

    def __init__(self, limits: ApproximateLimits | None) -> None:
        self._limits = limits
        self.are_made = limits is not None
        self._indexes: dict[Scope, ApproximateIndex] = {}
        self.refused_prompts = 0

    def insert(self, scope: Scope, rank: Rank, sequence_hashes: HashArray, now_s: float) -> None:
        """Count a booked prompt's blocks as held by its rank until they expire. O(blocks)."""
        if self._limits is None:
            return
        index = self._indexes.get(scope)
        if index is None:
            tree = RadixTree(2 * self._limits.max_blocks)  # entries are stored before pruning
            index = self._indexes[scope] = ApproximateIndex(tree, self._limits)
        if not index.insert(rank, sequence_hashes, now_s):
            self.refused_prompts += 1

    def added_to(
        self, known: OverlapScores, scope: Scope, sequence_hashes: HashArray
    ) -> OverlapScores:
        """Return, per rank and tier, the larger of the known and the estimated overlap."""
        index = self._indexes.get(scope)
        if index is None:
            return known
        guessed = index.find_matches(sequence_hashes)
        return merge_maximum(known, guessed) if len(guessed) else known

    def trees(self, scope: Scope) -> tuple[SearchedTree, ...]:
        """Return the trees of a scope's estimates."""
        index = self._indexes.get(scope)
        return () if index is None else index.trees

    def drop_rank(self, rank: Rank) -> None:
        """Remove a rank; unknown ones are ignored."""
        for index in self._indexes.values():
            index.remove_rank(rank)

    def expire(self, now_s: float) -> bool:
        """Free a slice of expired and removed entries. Returns False once nothing is left."""
        left = [
            bool(index.expire(now_s, SLICE_BLOCKS)) | index.sweep(SLICE_SUB_TABLES)
            for index in self._indexes.values()
        ]
        return any(left)

    def dump_slices(self) -> Iterator[tuple[Scope, HeldSlice]]:
        """Yield all estimated blocks, by scope and in slices; see `Indexer`."""
        for scope, index in sorted(self._indexes.items()):
            for part in index.dump_slices():
                yield scope, part

    def entry_counts(self) -> dict[Scope, int]:
        """Return the number of (rank, block) entries per scope."""
        return {scope: index.entry_count() for scope, index in self._indexes.items()}

    def freed_blocks(self) -> tuple[int, int]:
        """Return the number of entries that expired, and of those pruned at the limit."""
        indexes = self._indexes.values()
        expired = sum(index.expired_blocks for index in indexes)
        return expired, sum(index.pruned_blocks for index in indexes)
