"""What an index of held blocks is asked and told, free of how it keeps them."""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from msgspec import Struct

from router.protocol.values import HashArray, PerTier, Rank, Tier


class Overlap(Struct, frozen=True, array_like=True):
    """Leading blocks of a prompt that a rank holds; cumulative: `disk` is device, host or disk."""

    device: int
    host: int
    disk: int
    remote: int


NO_OVERLAP = Overlap(0, 0, 0, 0)

OverlapScores: TypeAlias = Mapping[Rank, Overlap]
"""Ranks that hold at least the first block of the prompt in some tier."""


class HeldSummary(Struct, frozen=True):
    """Size and digest of what a rank holds, per tier; comparable with its agent's `HeldState`."""

    counts: PerTier
    digests: PerTier


class Indexer(Protocol):
    """Which blocks does every rank hold? Exact: neither order nor repetition of changes matters.

    Hash arguments are arrays of shape (blocks,). Ranks come into being with their first block.
    Complexities are per call, in blocks named.
    """

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> None:
        """Note that the rank holds these blocks in this tier. O(blocks)."""

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> None:
        """Note that it no longer does; blocks it does not hold there are passed over. O(blocks)."""

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Note that the rank holds nothing in this tier; None: in any."""

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """The longest held prefix of a prompt, per rank and cumulative tier. Mutates nothing."""

    def summary(self, rank: Rank) -> HeldSummary:
        """Count and digest of what the rank holds. O(1)."""

    def held(self, rank: Rank, tier: Tier) -> HashArray:
        """Every block the rank holds in this tier, in no order. O(blocks held)."""

    def block_count(self) -> int:
        """Distinct blocks held by anybody. O(1)."""
