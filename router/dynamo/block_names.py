"""What an engine's block hashes mean: the sequence hashes of one rank's blocks, by tier."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from router.protocol.values import HashArray, Tier
from router.sequence.hashing import chain, chain_hash


class BlockNames:
    """Engine hash ─▶ sequence hash, for each tier that holds the block.

    Where copies count, a block is held until the last of them goes. A name that no tier holds any
    more is remembered for a while, for children that come late; the longest forgotten goes first.
    About 170 bytes a block and tier.

    Invariant: what has more copies than one is held.
    """

    __slots__ = ("_more", "_past", "_past_limit", "_tiers")

    def __init__(self, past_limit: int) -> None:
        self._past_limit = past_limit
        self._past: OrderedDict[int, int] = OrderedDict()
        self._tiers: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._more: dict[tuple[Tier, int], int] = {}

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

    def put(
        self, tier: Tier, block_hashes: Sequence[int], names: Sequence[int], *, counts_copies: bool
    ) -> list[int]:
        """Note that a tier holds these; the names of those that it did not hold before."""
        held, new = self._tiers[tier], []
        for block_hash, name in zip(block_hashes, names, strict=True):
            if block_hash not in held:
                new.append(name)
                held[block_hash] = name
                self._past.pop(block_hash, None)
            elif counts_copies:
                self._more[tier, block_hash] = self._more.get((tier, block_hash), 0) + 1
        return new

    def drop(self, tier: Tier, block_hashes: Iterable[int]) -> tuple[list[int], list[int]]:
        """Note that a copy of each went from a tier; the names of those of which it was the last,
        and the hashes that it did not hold.
        """
        held, gone, unknown = self._tiers[tier], [], []
        for block_hash in block_hashes:
            if block_hash not in held:
                unknown.append(block_hash)
            elif not self._had_more(tier, block_hash):
                gone.append(held.pop(block_hash))
                self.remember(block_hash, gone[-1])
        return gone, unknown

    def clear(self, tier: Tier) -> None:
        """Note that a tier is empty. O(blocks there)."""
        self._more = {key: more for key, more in self._more.items() if key[0] != tier}
        self.drop(tier, list(self._tiers[tier]))

    def forget(self, block_hash: int) -> list[tuple[Tier, int]]:
        """Note that a block is gone, all its copies; the tiers that held it, and its name."""
        gone = [(tier, self._tiers[tier].pop(block_hash)) for tier in self.tiers_of(block_hash)]
        for tier, _ in gone:
            self._more.pop((tier, block_hash), None)
        return gone

    def remember(self, block_hash: int, name: int) -> None:
        """Keep the name of a block for a while, unless a tier holds it."""
        if self.tiers_of(block_hash):
            return
        self._past[block_hash] = name
        if len(self._past) > self._past_limit:
            self._past.popitem(last=False)

    def _had_more(self, tier: Tier, block_hash: int) -> bool:
        """Whether there was more than one copy; then there is one less."""
        more = self._more.get((tier, block_hash), 0)
        if more > 1:
            self._more[tier, block_hash] = more - 1
        elif more:
            del self._more[tier, block_hash]
        return more > 0


def names_behind(parent: int | None, local_hashes: Sequence[int]) -> HashArray:
    """Sequence hashes of consecutive blocks behind the block of this name. O(blocks)."""
    first = chain_hash(parent, local_hashes[0])
    return chain(np.array([first, *local_hashes[1:]], np.uint64))
