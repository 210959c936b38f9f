"""Blocks estimated from bookings: beside those reported by events, or of ranks without events.

    rank with events ──▶ predicted: what its events will soon say      short-lived, off by default
    rank without     ──▶ estimated: all that is known of its cache     `EstimateLimits`

Each has one index per scope, because entries of one index all live for the same time.
"""

from collections.abc import Callable, Iterator

from msgspec import Struct

from router.indexer.approximate import ApproximateIndex, ApproximateLimits, merge_maximum
from router.indexer.base import HeldSlice, OverlapScores, SearchedTree
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.values import HashArray, Rank, Scope

SLICE_BLOCKS = 512
SLICE_SUB_TABLES = 64


class EstimateLimits(Struct, frozen=True):
    """The limits of blocks of ranks with events, and without; None: none are estimated there."""

    beside_events: ApproximateLimits | None = None
    without_events: ApproximateLimits | None = ApproximateLimits()


NO_ESTIMATES = EstimateLimits(None, None)


class Predictions:
    """Blocks that recently booked prompts are expected to leave in the caches.

    `are_made`: True if blocks of any rank are estimated. `refused_prompts`: the number of prompts
    that found no room. `keeps_prompts`: whether a rank keeps all blocks of a prompt, as ranks of
    hybrid models do not; beside events, nothing is estimated for the others.
    """

    __slots__ = (
        "_beside",
        "_instead",
        "_keeps_prompts",
        "_limits",
        "_without_events",
        "are_made",
        "refused_prompts",
    )

    def __init__(
        self, limits: EstimateLimits, keeps_prompts: Callable[[Rank], bool] = lambda _: True
    ) -> None:
        self._limits = limits
        self._keeps_prompts = keeps_prompts
        self._beside: dict[Scope, ApproximateIndex] = {}
        self._instead: dict[Scope, ApproximateIndex] = {}
        self._without_events: set[Rank] = set()
        self.are_made = limits.beside_events is not None
        self.refused_prompts = 0

    def set_without_events(self, rank: Rank, *, is_without: bool) -> None:
        """Begin or end to estimate the blocks of a rank in place of events."""
        if is_without and self._limits.without_events is not None:
            self._without_events.add(rank)
        elif rank in self._without_events:
            self._without_events.discard(rank)
            for index in self._instead.values():
                index.remove_rank(rank)
        self.are_made = self._limits.beside_events is not None or bool(self._without_events)

    def insert(self, scope: Scope, rank: Rank, sequence_hashes: HashArray, now_s: float) -> None:
        """Count a booked prompt's blocks as held by its rank until they expire. O(blocks)."""
        limits, indexes = self._limits.beside_events, self._beside
        if rank in self._without_events:
            limits, indexes = self._limits.without_events, self._instead
        elif not self._keeps_prompts(rank):
            return
        if limits is None:
            return
        index = indexes.get(scope)
        if index is None:
            tree = RadixTree(2 * limits.max_blocks)  # entries are stored before pruning
            index = indexes[scope] = ApproximateIndex(tree, limits)
        if not index.insert(rank, sequence_hashes, now_s):
            self.refused_prompts += 1

    def added_to(
        self, known: OverlapScores, scope: Scope, sequence_hashes: HashArray
    ) -> OverlapScores:
        """Return, per rank and tier, the larger of the known and the estimated overlap."""
        for index in self._of(scope):
            guessed = index.find_matches(sequence_hashes)
            known = merge_maximum(known, guessed) if len(guessed) else known
        return known

    def trees(self, scope: Scope) -> tuple[SearchedTree, ...]:
        """Return the trees of a scope's estimates."""
        return tuple(tree for index in self._of(scope) for tree in index.trees)

    def drop_rank(self, rank: Rank) -> None:
        """Remove a rank; unknown ones are ignored."""
        self.set_without_events(rank, is_without=False)
        for index in self._beside.values():
            index.remove_rank(rank)

    def expire(self, now_s: float) -> bool:
        """Free a slice of expired and removed entries. Returns False once nothing is left."""
        left = [
            bool(index.expire(now_s, SLICE_BLOCKS)) | index.sweep(SLICE_SUB_TABLES)
            for index in (*self._beside.values(), *self._instead.values())
        ]
        return any(left)

    def dump_slices(self) -> Iterator[tuple[Scope, HeldSlice]]:
        """Yield the estimated blocks of ranks without events, by scope and in slices."""
        for scope, index in sorted(self._instead.items()):
            for part in index.dump_slices():
                yield scope, part

    def held_blocks(self, rank: Rank) -> int:
        """Return the number of a rank's blocks that are estimated in place of events. O(scopes)."""
        if rank not in self._without_events:
            return 0
        return sum(index.held_blocks(rank) for index in self._instead.values())

    def entry_counts(self) -> dict[Scope, int]:
        """Return the number of (rank, block) entries per scope."""
        scopes = sorted({*self._beside, *self._instead})
        return {scope: sum(e.entry_count() for e in self._of(scope)) for scope in scopes}

    def freed_blocks(self) -> tuple[int, int]:
        """Return the number of entries that expired, and of those pruned at the limit."""
        indexes = (*self._beside.values(), *self._instead.values())
        expired = sum(index.expired_blocks for index in indexes)
        return expired, sum(index.pruned_blocks for index in indexes)

    def _of(self, scope: Scope) -> list[ApproximateIndex]:
        found = (self._beside.get(scope), self._instead.get(scope))
        return [index for index in found if index is not None]
