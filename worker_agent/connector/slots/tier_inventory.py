"""The contents of all tiers of a stack by public hash, and the events that publish them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from router.protocol.events import CLEARED, REMOVED, STORED
from router.protocol.values import HashArray, Tier
from router.publisher.feed.tier_wire import Held, Paths, TierEvent, parts, paths_of
from router.publisher.journal.held_blocks import DEFAULT_MULTIPLIER, HeldBlocks, path_heads
from worker_agent.blocks.changes import BlockStored, CacheCleared, Change
from worker_agent.blocks.names import BlockName

_NO_PATHS = Paths(b"", b"")
_NO_HEADS = np.empty(0, np.uint64)


class TierInventory:
    """Blocks of all tiers by public hash.

    Public hashes have 64 bits, and two blocks may share one: it is held until both are removed.

    Invariant: `_more` counts, for each tier and hash, the blocks beyond the first.
    """

    __slots__ = ("_held", "_more")

    def __init__(self, multiplier: int = DEFAULT_MULTIPLIER) -> None:
        """Create an empty inventory. `multiplier`: odd; see `ExportedBlocks`."""
        self._held = HeldBlocks(multiplier)
        self._more: Counter[tuple[Tier, int]] = Counter()

    def apply(self, changes: Sequence[tuple[Tier, Change]]) -> list[TierEvent]:
        """Apply changes in order and return the events to publish. O(blocks)."""
        changed = (
            self._applied(tier, kind, [change for _, change in run])
            for (tier, kind), run in groupby(changes, lambda each: (each[0], type(each[1])))
        )
        return [event for event in changed if event is not None]

    def held(self) -> Iterator[Held]:
        """Return all held blocks, in parts, as of now. O(capacity) before the first part."""
        tiers = [(tier, *self._held.paths(tier)) for tier in Tier]
        return (Held(tier, part) for tier, hashes, heads in tiers for part in parts(hashes, heads))

    def _applied(self, tier: Tier, kind: type, changes: Sequence[Change]) -> TierEvent | None:
        named = [each.name for each in changes if not isinstance(each, CacheCleared)]
        names = [name for name in named if name.is_published]
        if kind is CacheCleared:
            self._held.clear(tier)
            self._more = Counter({key: n for key, n in self._more.items() if key[0] != tier})
            return TierEvent(CLEARED, tier, _NO_PATHS)
        if not names:
            return None
        if kind is BlockStored:
            return TierEvent(STORED, tier, self._stored(tier, names))
        gone = [name.sequence_hash for name in names if self._is_last(tier, name.sequence_hash)]
        if not gone:
            return None
        hashes = self._held.remove(tier, gone)
        return TierEvent(REMOVED, tier, paths_of(hashes, _NO_HEADS))

    def _stored(self, tier: Tier, names: Sequence[BlockName]) -> Paths:
        hashes, heads = _in_paths(names)
        new = self._held.store_paths(tier, hashes, heads)
        if len(new) < len(hashes):
            known = Counter(hashes.tolist()) - Counter(new.tolist())
            self._more.update({(tier, each): count for each, count in known.items()})
        return paths_of(hashes, heads)

    def _is_last(self, tier: Tier, sequence_hash: int) -> bool:
        key = tier, sequence_hash
        if key not in self._more:
            return True
        self._more[key] -= 1
        if not self._more[key]:
            del self._more[key]
        return False


def _in_paths(names: Sequence[BlockName]) -> tuple[HashArray, HashArray]:
    """Return the hashes, and the path head of each run of consecutive blocks."""
    counts: list[int] = []
    parents: list[int | None] = []
    before: int | None = None
    for name in names:
        if counts and name.parent_sequence_hash == before:
            counts[-1] += 1
        else:
            counts.append(1)
            parents.append(name.parent_sequence_hash)
        before = name.sequence_hash
    hashes = np.array([name.sequence_hash for name in names], np.uint64)
    return hashes, path_heads(counts, parents)
