"""The KV blocks of one simulated engine: named blocks outlive their requests, nameless ones do not.

A block is *used* by running requests, or *idle*: kept for later requests, and evicted, least
recently used first, when space is needed. Prompts are whole prefixes and are released from their
ends, so the cached blocks of full attention are always closed under prefixes. Blocks of the other
layers of a hybrid model share the space (`checkpoints.py`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice


class BlockCache:
    """The blocks of an engine by name: a sequence hash, or one with a group of layers.

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

    def __contains__(self, name: int) -> bool:
        """Return whether a block is cached, used or idle."""
        return name in self._uses or name in self._idle

    def matching(self, sequence_hashes: Sequence[int], limit_blocks: int) -> int:
        """Return the number of leading blocks in the cache, up to a limit. O(blocks)."""
        for position, sequence_hash in enumerate(islice(sequence_hashes, limit_blocks)):
            if sequence_hash not in self:
                return position
        return min(len(sequence_hashes), limit_blocks)

    def take(self, matched: Sequence[int], further_blocks: int) -> bool:
        """Use cached blocks and `further_blocks` nameless ones.

        Returns False, without a change, if they do not fit. O(blocks).
        """
        newly_used = sum(each in self._idle for each in matched)
        if self.used_blocks + newly_used + further_blocks > self.capacity_blocks:
            return False
        for name in matched:
            self._use(name)
        self._nameless_blocks += further_blocks
        self._evict()
        return True

    def name(self, names: Sequence[int]) -> None:
        """Give nameless blocks in use these names. They stay in use. O(blocks).

        A second copy of a named block is freed.
        """
        self._nameless_blocks -= len(names)
        for name in names:
            self._use(name)

    def release(self, names: Sequence[int], nameless_blocks: int) -> None:
        """Release named blocks of a request, from their end, and nameless ones. O(blocks)."""
        self._nameless_blocks -= nameless_blocks
        for name in reversed(names):
            uses = self._uses[name] - 1
            if uses:
                self._uses[name] = uses
            else:
                del self._uses[name]
                self._idle[name] = None

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

    def _use(self, name: int) -> None:
        self._idle.pop(name, None)
        self._uses[name] = self._uses.get(name, 0) + 1

    def _evict(self) -> None:
        excess = self.used_blocks + len(self._idle) - self.capacity_blocks
        for _ in range(excess):
            self.evicted.append(self._idle.popitem(last=False)[0])
