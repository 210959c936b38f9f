"""The KV blocks of one simulated engine: named blocks outlive their requests, nameless ones do not.

A block is *used* by running requests, or *idle*: kept for later requests, and evicted, least
recently used first, when space is needed. Prompts are whole prefixes and are released from their
ends, so the cached blocks are always closed under prefixes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice


class BlockCache:
    """The blocks of an engine by sequence hash.

    Invariants: a named block is used or idle, never both; used, idle and nameless blocks together
    fit in `capacity_blocks`. `evicted`: names evicted since the last `take_evicted`.
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
        """Return the number of leading blocks in the cache, up to a limit. O(blocks)."""
        for position, sequence_hash in enumerate(islice(sequence_hashes, limit_blocks)):
            if sequence_hash not in self._uses and sequence_hash not in self._idle:
                return position
        return min(len(sequence_hashes), limit_blocks)

    def take(self, matched: Sequence[int], further_blocks: int) -> bool:
        """Use cached blocks and `further_blocks` nameless ones.

        Returns False, without a change, if they do not fit. O(blocks).
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
        """Give nameless blocks in use these names. They stay in use. O(blocks).

        A second copy of a named block is freed.
        """
        self._nameless_blocks -= len(sequence_hashes)
        for sequence_hash in sequence_hashes:
            self._use(sequence_hash)

    def release(self, sequence_hashes: Sequence[int], nameless_blocks: int) -> None:
        """Release the blocks of a request's prompt and its nameless blocks. O(blocks)."""
        self._nameless_blocks -= nameless_blocks
        for sequence_hash in reversed(sequence_hashes):
            uses = self._uses[sequence_hash] - 1
            if uses:
                self._uses[sequence_hash] = uses
            else:
                del self._uses[sequence_hash]
                self._idle[sequence_hash] = None

    def take_evicted(self) -> list[int]:
        """Return the names evicted since the last call."""
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
