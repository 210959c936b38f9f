"""Guesses beside, or instead of, what events say: one approximate index per scope."""

from collections.abc import Iterator

from router.indexer.approximate import ApproximateIndex, ApproximateLimits, merge_maximum
from router.indexer.base import HeldSlice, OverlapScores
from router.indexer.radix_tree import RadixTree
from router.protocol.values import HashArray, Rank, Scope

SLICE_BLOCKS = 512
SLICE_SUB_TABLES = 64


class Predictions:
    """What the prompts booked lately will have left in the caches; without limits, nothing.

    `refused_prompts`: how many found no room.
    """

    __slots__ = ("_indexes", "_limits", "refused_prompts")

    def __init__(self, limits: ApproximateLimits | None) -> None:
        self._limits = limits
        self._indexes: dict[Scope, ApproximateIndex] = {}
        self.refused_prompts = 0

    @property
    def are_made(self) -> bool:
        """Whether there is anything to add to what is known."""
        return self._limits is not None

    def insert(self, scope: Scope, rank: Rank, sequence_hashes: HashArray, now_s: float) -> None:
        """Count a booked prompt's blocks as held by its rank for a while. O(blocks)."""
        if self._limits is None:
            return
        index = self._indexes.get(scope)
        if index is None:
            tree = RadixTree(2 * self._limits.max_blocks)  # pruning comes after storing
            index = self._indexes[scope] = ApproximateIndex(tree, self._limits)
        if not index.insert(rank, sequence_hashes, now_s):
            self.refused_prompts += 1

    def added_to(
        self, known: OverlapScores, scope: Scope, sequence_hashes: HashArray
    ) -> OverlapScores:
        """Per rank and tier the larger of what is known and what is guessed."""
        index = self._indexes.get(scope)
        if index is None:
            return known
        guessed = index.find_matches(sequence_hashes)
        return merge_maximum(known, guessed) if len(guessed) else known

    def tree(self, scope: Scope) -> RadixTree | None:
        """What guesses of a scope are searched in, once there are any."""
        index = self._indexes.get(scope)
        return None if index is None else index.tree

    def drop_rank(self, rank: Rank) -> None:
        """Forget a rank; unknown ones are passed over."""
        for index in self._indexes.values():
            index.remove_rank(rank)

    def expire(self, now_s: float) -> bool:
        """Free a slice of what is due or dropped; False once nothing is left to do."""
        left = [
            bool(index.expire(now_s, SLICE_BLOCKS)) | index.sweep(SLICE_SUB_TABLES)
            for index in self._indexes.values()
        ]
        return any(left)

    def dump_slices(self) -> Iterator[tuple[Scope, HeldSlice]]:
        """Everything guessed, by scope and in slices; see `Indexer`."""
        for scope, index in sorted(self._indexes.items()):
            for part in index.dump_slices():
                yield scope, part

    def entry_counts(self) -> dict[Scope, int]:
        """(rank, block) entries per scope."""
        return {scope: index.entry_count() for scope, index in self._indexes.items()}

    def freed_blocks(self) -> tuple[int, int]:
        """How many entries expired, and how many were pruned for want of room."""
        indexes = self._indexes.values()
        expired = sum(index.expired_blocks for index in indexes)
        return expired, sum(index.pruned_blocks for index in indexes)
