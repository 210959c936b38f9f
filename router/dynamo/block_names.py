"""What an engine's block hashes mean: the sequence hashes of one rank's blocks, by tier."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from router.protocol.values import HashArray, Tier
from router.sequence.hashing import chain, chain_hash


class BlockNames:
    """Engine hash ─▶ sequence hash, for each tier that holds the block.

    A name that no tier holds any more is remembered for a while, for children that come late; the
    longest forgotten goes first. About 170 bytes a block and tier.
    """

    __slots__ = ("_past", "_past_limit", "_tiers")

    def __init__(self, past_limit: int) -> None:
        self._past_limit = past_limit
        self._past: OrderedDict[int, int] = OrderedDict()
        self._tiers: tuple[dict[int, int], ...] = tuple({} for _ in Tier)

    @property
    def held_blocks(self) -> int:
        """Blocks held, once for each tier."""
        return sum(map(len, self._tiers))

    @property
    def held_lower_blocks(self) -> int:
        """The same without the device."""
        return self.held_blocks - len(self._tiers[Tier.DEVICE])

    def find(self, block_hash: int) -> int | None:
        """The name of a block that is held, or was not long ago."""
        for held in self._tiers:
            if (name := held.get(block_hash)) is not None:
                return name
        return self._past.get(block_hash)

    def tiers_of(self, block_hash: int) -> list[Tier]:
        """Where it is held."""
        return [tier for tier in Tier if block_hash in self._tiers[tier]]

    def names(self, tier: Tier) -> set[int]:
        """The names of all that this tier holds. O(blocks there)."""
        return set(self._tiers[tier].values())

    def put(self, tier: Tier, block_hashes: Sequence[int], names: Sequence[int]) -> list[int]:
        """Note that a tier holds these; the names of those that it did not hold before."""
        held = self._tiers[tier]
        new = [n for h, n in zip(block_hashes, names, strict=True) if h not in held]
        held.update(zip(block_hashes, names, strict=True))
        if self._past:
            for block_hash in block_hashes:
                self._past.pop(block_hash, None)
        return new

    def drop(self, tier: Tier, block_hashes: Iterable[int]) -> list[int]:
        """Note that a tier holds these no more; the names of those that it held."""
        held = self._tiers[tier]
        gone = []
        for block_hash in block_hashes:
            if (name := held.pop(block_hash, None)) is not None:
                gone.append(name)
                self.remember(block_hash, name)
        return gone

    def clear(self, tier: Tier) -> None:
        """Note that a tier is empty. O(blocks there)."""
        self.drop(tier, list(self._tiers[tier]))

    def remember(self, block_hash: int, name: int) -> None:
        """Keep the name of a block for a while, unless a tier holds it."""
        if self.tiers_of(block_hash):
            return
        self._past[block_hash] = name
        if len(self._past) > self._past_limit:
            self._past.popitem(last=False)


def names_behind(parent: int | None, local_hashes: Sequence[int]) -> HashArray:
    """Sequence hashes of consecutive blocks behind the block of this name. O(blocks)."""
    first = chain_hash(parent, local_hashes[0])
    return chain(np.array([first, *local_hashes[1:]], np.uint64))
