"""Changes of block names, in one tier and in all tiers, and other ranks that have a prefix."""

from collections.abc import Iterable
from typing import TypeAlias

from msgspec import Struct

from worker_agent.blocks.names import BlockName


class BlockStored(Struct, frozen=True, gc=False, tag=True):
    """A block that was named."""

    name: BlockName


class BlockRemoved(Struct, frozen=True, gc=False, tag=True):
    """A named block that was evicted or lost its name."""

    name: BlockName


class CacheCleared(Struct, frozen=True, tag=True):
    """The removal of every name."""


Change: TypeAlias = BlockStored | BlockRemoved | CacheCleared


class MergedTiers:
    """The names that the tiers hold, merged: stored with the first tier, removed with the last.

    Invariant: a name is here exactly while a tier holds it, so that nothing is removed before it
    was stored.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[BlockName, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def tiers(self, identity: bytes) -> int:
        """Return a mask of the tiers that hold this block."""
        return self._held[identity][1] if identity in self._held else 0

    def apply(self, tier: int, changes: Iterable[Change]) -> list[Change]:
        """Apply a tier's changes (`tier` is one bit); return those of all tiers. O(changes)."""
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
