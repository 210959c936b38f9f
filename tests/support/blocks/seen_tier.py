"""A tier of a stack in this process, as the leader looks for blocks in it."""

from collections.abc import Sequence
from itertools import takewhile

from router.protocol.values import Tier
from worker_agent.blocks.pool import BlockPool
from worker_agent.connector.slots.held_prefix import LowerTier
from worker_agent.tiers.stack import TierStack


class SeenTier:
    """What the stack knows to be in a tier. Where the tier has a pool that threads share, blocks
    are held in it; elsewhere they may be gone before they are loaded, which the load then says.
    """

    __slots__ = ("_bit", "_pool", "_stack")

    def __init__(self, stack: TierStack, tier: Tier, pool: BlockPool | None) -> None:
        self._stack = stack
        self._bit = 1 << tier
        self._pool = pool

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """Hold the leading blocks that are here. O(blocks found)."""
        known = list(takewhile(lambda each: self._stack.held(each) & self._bit, identities))
        return list(range(len(known))) if self._pool is None else self._pool.match(known)

    def release(self, blocks: Sequence[int]) -> None:
        """Give them back."""
        if self._pool is not None:
            self._pool.release(blocks)


def seen_tier(stack: TierStack, tier: Tier, pool: BlockPool | None = None) -> LowerTier:
    """A tier of the stack for slots; `pool`: its own, shared with its thread."""
    return LowerTier(tier, SeenTier(stack, tier, pool))
