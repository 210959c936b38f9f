"""Blocks whose parent nobody has told us of: kept, within bounds, until somebody does.

An orphan needs little room (its own hash, its content's, its parent's), so it may be adopted at any
time: when the parent is stored again, say. It is doubted once it has waited for longer than
messages overtake each other.
"""

from collections import OrderedDict
from collections.abc import Sequence

from router.dynamo.messages import StoredBlock
from router.protocol.values import Tier


class Orphan:
    """A block of unknown name, and the tiers it is held in, as a mask; 0: it only has children."""

    __slots__ = ("block", "parent", "since_s", "tiers")

    def __init__(self, block: StoredBlock, parent: int, since_s: float) -> None:
        self.block = block
        self.parent = parent
        self.since_s = since_s
        self.tiers = 0

    @property
    def held_tiers(self) -> list[Tier]:
        """The tiers it is held in."""
        return [tier for tier in Tier if self.tiers >> tier & 1]


class Orphans:
    """Orphans by their own hash and by their parent's, oldest first; beyond the limit the oldest is
    given up, and nobody will know its name.

    Invariant: every orphan is among the children of its parent, and nobody else is.
    """

    __slots__ = ("_by_hash", "_by_parent", "_limit", "_wait_s")

    def __init__(self, limit: int, wait_s: float) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._by_hash: OrderedDict[int, Orphan] = OrderedDict()
        self._by_parent: dict[int, list[Orphan]] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def add(self, tier: Tier, blocks: Sequence[StoredBlock], parent: int, now_s: float) -> int:
        """Keep consecutive blocks, the first behind an unknown parent; how many are given up."""
        for block in blocks:
            self._add(tier, block, parent, now_s)
            parent = block.block_hash
        beyond = max(len(self._by_hash) - self._limit, 0)
        for _ in range(beyond):
            self._remove(next(iter(self._by_hash.values())))
        return beyond

    def adopt(self, parent: int) -> list[Orphan]:
        """The children of a parent that is known now; orphans no longer."""
        children = list(self._by_parent.get(parent, ()))
        for orphan in children:
            self._remove(orphan)
        return children

    def take(self, block: StoredBlock) -> Orphan | None:
        """This block, an orphan no longer, for its name is known; None if it was none."""
        orphan = self._by_hash.get(block.block_hash)
        if orphan is None:
            return None
        self._remove(orphan)
        return orphan if orphan.block == block else None

    def drop(self, tier: Tier, block_hash: int) -> bool:
        """Note that a tier holds it no more; whether it did. Without children it is forgotten."""
        orphan = self._by_hash.get(block_hash)
        if orphan is None or not orphan.tiers >> tier & 1:
            return False
        orphan.tiers &= ~(1 << tier)
        while orphan is not None and not orphan.tiers and block_hash not in self._by_parent:
            self._remove(orphan)
            block_hash = orphan.parent
            orphan = self._by_hash.get(block_hash)
        return True

    def clear(self, tier: Tier) -> None:
        """Note that a tier is empty. O(orphans)."""
        for block_hash in reversed(list(self._by_hash)):
            self.drop(tier, block_hash)

    def are_overdue(self, now_s: float) -> bool:
        """Whether a block that is held has waited for its parent for too long."""
        oldest = next((o for o in self._by_hash.values() if o.tiers), None)
        return oldest is not None and now_s - oldest.since_s >= self._wait_s

    def check_invariants(self) -> None:
        """Assert the invariant. O(orphans)."""
        children = {id(o): p for p, orphans in self._by_parent.items() for o in orphans}
        assert children == {id(o): o.parent for o in self._by_hash.values()}
        assert all(o.block.block_hash == h for h, o in self._by_hash.items())
        assert len(self) <= self._limit

    def _add(self, tier: Tier, block: StoredBlock, parent: int, now_s: float) -> None:
        orphan = self._by_hash.get(block.block_hash)
        if orphan is not None and (orphan.parent, orphan.block) != (parent, block):
            self._remove(orphan)  # the hash is used again, for another block
            orphan = None
        if orphan is None:
            orphan = Orphan(block, parent, now_s)
            self._by_hash[block.block_hash] = orphan
            self._by_parent.setdefault(parent, []).append(orphan)
        orphan.tiers |= 1 << tier

    def _remove(self, orphan: Orphan) -> None:
        del self._by_hash[orphan.block.block_hash]
        siblings = self._by_parent[orphan.parent]
        siblings.remove(orphan)
        if not siblings:
            del self._by_parent[orphan.parent]
