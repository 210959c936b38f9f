"""What happened to names: in a tier, and in all tiers together."""

from collections.abc import Iterable
from typing import TypeAlias

from msgspec import Struct

from worker_agent.blocks.names import BlockName


class BlockStored(Struct, frozen=True, gc=False, tag=True):
    """A block got its name."""

    name: BlockName


class BlockRemoved(Struct, frozen=True, gc=False, tag=True):
    """A named block was given up."""

    name: BlockName


class CacheCleared(Struct, frozen=True, tag=True):
    """Every name was taken away."""


Change: TypeAlias = BlockStored | BlockRemoved | CacheCleared


class MergedTiers:
    """Which tiers hold what, as one: stored with the first tier that has it, removed with the last.

    Invariant: a name is here exactly while a tier holds it, so that nothing is removed before it
    was stored.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[BlockName, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def tiers(self, identity: bytes) -> int:
        """A mask of the tiers that hold this."""
        return self._held[identity][1] if identity in self._held else 0

    def apply(self, tier: int, changes: Iterable[Change]) -> list[Change]:
        """What the changes of a tier (a single bit) mean for all of them. O(changes)."""
        return [each for change in changes for each in self._merged(tier, change)]

    def _merged(self, tier: int, change: Change) -> list[Change]:
        match change:
            case BlockStored(name):
                before = self.tiers(name.identity)
                self._held[name.identity] = name, before | tier
                return [] if before else [change]
            case BlockRemoved(name):
                return self._removed(tier, name)
            case CacheCleared():
                held = [name for name, tiers in self._held.values() if tiers & tier]
                return [each for name in held for each in self._removed(tier, name)]

    def _removed(self, tier: int, name: BlockName) -> list[Change]:
        left = self.tiers(name.identity) & ~tier
        if left:
            self._held[name.identity] = name, left
            return []
        del self._held[name.identity]
        return [BlockRemoved(name)]
