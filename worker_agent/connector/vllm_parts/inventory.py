"""What the tiers of all workers hold, as the leader was told: tiers are in workers' processes.

Nothing is held there for the leader: a block may be gone before it is loaded, which the load says.
"""

from collections.abc import Sequence
from itertools import takewhile

from router.protocol.values import Tier
from worker_agent.blocks.changes import MergedTiers
from worker_agent.connector.holding import LowerTier
from worker_agent.tiers.stack import TierChange

LOWER_TIERS = (Tier.HOST, Tier.DISK, Tier.REMOTE)


class Inventory:
    """A block is of use if every worker has its part of it."""

    __slots__ = ("_ranks",)

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [MergedTiers() for _ in range(num_ranks)]

    def __len__(self) -> int:
        """Blocks of which some worker has its part."""
        return max(len(rank) for rank in self._ranks)

    def apply(self, rank: int, changes: Sequence[TierChange]) -> None:
        """What a worker told, in order. O(changes)."""
        for each in changes:
            self._ranks[rank].apply(1 << each.tier, [each.change])

    def has(self, identity: bytes, slowest: Tier) -> bool:
        """Whether every worker has it in this tier, or a faster one."""
        mask = (2 << slowest) - 1
        return all(rank.tiers(identity) & mask for rank in self._ranks)

    def clear(self) -> None:
        """The tiers are to be cleared: nothing in them is of use."""
        self._ranks = [MergedTiers() for _ in self._ranks]

    def sources(self) -> list[LowerTier]:
        """The tiers as slots look for blocks in them."""
        return [LowerTier(tier, _ToldTier(self, tier)) for tier in LOWER_TIERS]


class _ToldTier:
    """A tier, and the faster ones: they follow each other within a prompt in any order."""

    __slots__ = ("_inventory", "_tier")

    def __init__(self, inventory: Inventory, tier: Tier) -> None:
        self._inventory = inventory
        self._tier = tier

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """The leading blocks that are here. O(blocks found)."""
        found = takewhile(lambda each: self._inventory.has(each, self._tier), identities)
        return list(range(sum(1 for _ in found)))

    def release(self, blocks: Sequence[int]) -> None:
        """Nothing is held."""
