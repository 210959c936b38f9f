"""The block pool of one tier: which block holds what, who uses it, and which goes next.

Every block is in exactly one state:

            allocate                     register, hash new
    free ─────────────▶ private ──────────────────────────────▶ shared ◀──┐
     ▲                     │                                      │      │ match
     │  release            │                    release, last user ▼      │
     └─────────────────────┘                                    cached ───┘
     ▲                                                             │
     └────────────────── evict (least recently used first) ────────┘

private: in use, without a name. shared: in use, named by its sequence hash. cached: named, unused.
A block whose hash another block already carries is not registered: its user is given that other
block, which holds the same bytes. Prompts are released tail first, so that a suffix is evicted
before the prefix it is worthless without.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct


class BlockStored(Struct, frozen=True):
    """A block got its name."""

    sequence_hash: int
    parent: int | None


class BlockRemoved(Struct, frozen=True):
    """A named block was evicted."""

    sequence_hash: int


class CacheCleared(Struct, frozen=True):
    """Every name was taken away."""


Change: TypeAlias = BlockStored | BlockRemoved | CacheCleared


class BlockPool:
    """Blocks 0 to `num_blocks` − 1.

    Invariants: free, private, shared and cached blocks partition the pool; a name leads to one
    block and back; a block has users exactly if it is private or shared.
    """

    __slots__ = ("_by_hash", "_cached", "_changes", "_free", "_hashes", "_users")

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(num_blocks))
        self._users = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks
        self._by_hash: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._changes: list[Change] = []

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._users)

    @property
    def available_blocks(self) -> int:
        """Blocks that could be allocated now: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def used_blocks(self) -> int:
        """Blocks in use by somebody."""
        return self.num_blocks - self.available_blocks

    def matching(self, sequence_hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt are here. Mutates nothing. O(matches)."""
        for position, sequence_hash in enumerate(sequence_hashes):
            if sequence_hash not in self._by_hash:
                return position
        return len(sequence_hashes)

    def match(self, sequence_hashes: Sequence[int]) -> list[int]:
        """Use the leading blocks of a prompt that are here. O(matches)."""
        blocks = [self._by_hash[h] for h in sequence_hashes[: self.matching(sequence_hashes)]]
        for block in blocks:
            self._use(block)
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Use so many private blocks, evicting what is needed; None, and nothing done, if not."""
        if count > self.available_blocks:
            return None
        while len(self._free) < count:
            self._evict()
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def register(self, block: int, sequence_hash: int, parent: int | None) -> int:
        """Name a private block by what it holds; the block to use from now on in its place."""
        assert self._users[block] == 1
        assert self._hashes[block] is None
        known = self._by_hash.get(sequence_hash)
        if known is not None:
            self._use(known)
            self.release([block])
            return known
        self._hashes[block] = sequence_hash
        self._by_hash[sequence_hash] = block
        self._changes.append(BlockStored(sequence_hash, parent))
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Use these blocks, in prompt order, no longer."""
        for block in reversed(blocks):
            assert self._users[block] > 0
            self._users[block] -= 1
            if not self._users[block]:
                self._retire(block)

    def clear(self) -> None:
        """Take every name away; blocks in use go on as private ones."""
        for block in self._by_hash.values():
            self._hashes[block] = None
        self._free.extend(self._cached)
        self._cached.clear()
        self._by_hash.clear()
        self._changes = [CacheCleared()]

    def take_changes(self) -> list[Change]:
        """What happened to names since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(blocks)."""
        assert len(set(self._free)) == len(self._free)
        assert not set(self._free) & set(self._cached)
        for block, (users, sequence_hash) in enumerate(zip(self._users, self._hashes, strict=True)):
            assert (block in self._free) == (users == 0 and sequence_hash is None)
            assert (block in self._cached) == (users == 0 and sequence_hash is not None)
            if sequence_hash is not None:
                assert self._by_hash[sequence_hash] == block
        assert len(self._by_hash) == sum(h is not None for h in self._hashes)

    def _use(self, block: int) -> None:
        if not self._users[block]:
            del self._cached[block]
        self._users[block] += 1

    def _retire(self, block: int) -> None:
        if self._hashes[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        sequence_hash = self._hashes[block]
        assert sequence_hash is not None
        self._hashes[block] = None
        del self._by_hash[sequence_hash]
        self._free.append(block)
        self._changes.append(BlockRemoved(sequence_hash))
