"""The KV blocks of one simulated engine: named ones that outlive their requests, and nameless ones.

A block is *used* by running requests, or *idle*: kept for whoever comes next, and evicted, least
recently used first, when the room is needed. Prompts are whole prefixes and are let go of from
their ends, so what is held is always closed under prefixes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice


class BlockCache:
    """Blocks by sequence hash.

    Invariants: a named block is used or idle, never both; used, idle and nameless blocks together
    fit in `capacity_blocks`. `evicted`: names evicted since somebody last took them.
    """

    __slots__ = ("_idle", "_nameless_blocks", "_uses", "capacity_blocks", "evicted")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._uses: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._nameless_blocks = 0
        self.evicted: list[int] = []

    @property
    def used_blocks(self) -> int:
        """Blocks of running requests, shared ones counted once."""
        return len(self._uses) + self._nameless_blocks

    def matching(self, sequence_hashes: Sequence[int], limit_blocks: int) -> int:
        """How many leading blocks are held, up to a limit. O(blocks)."""
        for position, sequence_hash in enumerate(islice(sequence_hashes, limit_blocks)):
            if sequence_hash not in self._uses and sequence_hash not in self._idle:
                return position
        return min(len(sequence_hashes), limit_blocks)

    def take(self, matched: Sequence[int], further_blocks: int) -> bool:
        """Use held blocks, and so many nameless ones; False, and no change, where they do not fit.

        O(blocks).
        """
        newly_used = sum(each in self._idle for each in matched)
        if self.used_blocks + newly_used + further_blocks > self.capacity_blocks:
            return False
        for sequence_hash in matched:
            self._use(sequence_hash)
        self._nameless_blocks += further_blocks
        self._evict()
        return True

    def name(self, sequence_hashes: Sequence[int]) -> None:
        """So many nameless blocks are these from now on; a second copy of one is let go. O(blocks).

        They stay used.
        """
        self._nameless_blocks -= len(sequence_hashes)
        for sequence_hash in sequence_hashes:
            self._use(sequence_hash)

    def release(self, sequence_hashes: Sequence[int], nameless_blocks: int) -> None:
        """A request needs its prompt's blocks, and these nameless ones, no longer. O(blocks)."""
        self._nameless_blocks -= nameless_blocks
        for sequence_hash in reversed(sequence_hashes):
            uses = self._uses[sequence_hash] - 1
            if uses:
                self._uses[sequence_hash] = uses
            else:
                del self._uses[sequence_hash]
                self._idle[sequence_hash] = None

    def take_evicted(self) -> list[int]:
        """Names evicted since the last call."""
        evicted, self.evicted = self.evicted, []
        return evicted

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(blocks)."""
        assert not self._uses.keys() & self._idle.keys()
        assert all(uses > 0 for uses in self._uses.values())
        assert self._nameless_blocks >= 0
        assert self.used_blocks + len(self._idle) <= self.capacity_blocks

    def _use(self, sequence_hash: int) -> None:
        self._idle.pop(sequence_hash, None)
        self._uses[sequence_hash] = self._uses.get(sequence_hash, 0) + 1

    def _evict(self) -> None:
        excess = self.used_blocks + len(self._idle) - self.capacity_blocks
        for _ in range(excess):
            self.evicted.append(self._idle.popitem(last=False)[0])
