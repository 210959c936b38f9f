"""The block pool of one tier: which block holds what, who uses it, and which goes next.

Every block is in exactly one state:

            allocate                register, name new
    free ─────────────▶ private ─────────────────────────▶ shared ◀──┐
     ▲                   │   │                            │  │       │ match
     │      release      │   │ register, name known       │  │       │
     ├───────────────────┘   │ and duplicates kept        │  │       │
     │      release          ▼                clear       │  │ release, last user
     ├─────────────────── nameless ◀──────────────────────┘  ▼       │
     │                                                     unused ───┘
     │                                                       │
     └──────────── evict (the pool's eviction policy) ───────┘

private: in use, and to be named. shared: in use, under its name. unused: kept under its name.
nameless: in use, and never to be named: another block has the name, or it was taken away. Prompts
are released tail first, so that a suffix is older than the prefix it is worthless without.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

from router.block_errors import BlockStateError, PoolInUseError
from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared, Change
from worker_agent.blocks.eviction.base import Eviction, Unused
from worker_agent.blocks.names import BlockName


class Duplicates(StrEnum):
    """What happens to a block whose name another block already has."""

    KEPT = "kept"
    """It stays in use as it is, until its user releases it."""
    REJECTED = "rejected"
    """Its user is given the other block, and it is free."""


class PoolStatus(Struct, frozen=True):
    """How many blocks are in use, kept unused, and empty."""

    active_blocks: int
    inactive_blocks: int
    empty_blocks: int


class ResetOutcome(Struct, frozen=True):
    """What became of names that were to be given up."""

    reset_blocks: list[bytes]
    not_found: list[bytes]
    not_reset: list[bytes]
    """Somebody uses them."""


class PoolCounters(Struct):
    """What a pool did since it was made."""

    allocations: int = 0
    evictions: int = 0
    registrations: int = 0
    duplicates: int = 0
    requested: int = 0
    matched: int = 0


_FREE: Final = 0
_PRIVATE: Final = 1
_SHARED: Final = 2
_NAMELESS: Final = 3
_UNUSED: Final = 4
_STATES: Final = ("free", "private", "shared", "nameless", "unused")


class BlockPool:
    """Blocks 0 to `num_blocks` - 1, by number: what handles and engines are built on.

    Every call is done whole or not at all. Invariants: a name leads to one block and back; a block
    has users exactly if it is private, shared or nameless, and one if it is private; the eviction
    policy has exactly the unused blocks.
    """

    __slots__ = (
        "_by_identity",
        "_changes",
        "_duplicates",
        "_eviction",
        "_free",
        "_names",
        "_priorities",
        "_states",
        "_tick",
        "_users",
        "counters",
    )

    def __init__(
        self, num_blocks: int, eviction: Eviction, duplicates: Duplicates = Duplicates.REJECTED
    ) -> None:
        self._free = deque(range(num_blocks))
        self._states = bytearray(num_blocks)
        self._users = [0] * num_blocks
        self._priorities = [0] * num_blocks
        self._names: list[BlockName | None] = [None] * num_blocks
        self._by_identity: dict[bytes, int] = {}
        self._eviction = eviction
        self._duplicates = duplicates
        self._changes: list[Change] = []
        self._tick = 0
        self.counters = PoolCounters()

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._users)

    @property
    def available_blocks(self) -> int:
        """Blocks that could be allocated now: free or unused."""
        return len(self._free) + len(self._eviction)

    @property
    def used_blocks(self) -> int:
        """Blocks in use by somebody."""
        return self.num_blocks - self.available_blocks

    @property
    def status(self) -> PoolStatus:
        """All blocks, by what becomes of them."""
        return PoolStatus(self.used_blocks, len(self._eviction), len(self._free))

    def name(self, block: int) -> BlockName | None:
        """What a block is called, if it has a name."""
        return self._names[block]

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────

    def matching(self, identities: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are here. Mutates nothing. O(matches)."""
        known = self._by_identity
        for position, identity in enumerate(identities):
            if identity not in known:
                return position
        return len(identities)

    def scan(self, identities: Iterable[bytes]) -> list[int | None]:
        """The block that holds each of these, if one does. Mutates nothing."""
        return [self._by_identity.get(identity) for identity in identities]

    # ── Using ────────────────────────────────────────────────────────────────────────────────────

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """Use the leading blocks of a prompt that are here. O(matches)."""
        matched = identities[: self.matching(identities)]
        self.counters.requested += len(identities)
        return self._use_known(matched)

    def match_scattered(self, identities: Sequence[bytes]) -> list[int | None]:
        """Use those of these blocks that are here, wherever there are gaps."""
        known = [identity for identity in identities if identity in self._by_identity]
        self.counters.requested += len(identities)
        self._use_known(known)
        return self.scan(identities)

    def use_again(self, blocks: Sequence[int]) -> Sequence[int]:
        """Another user of blocks that are in use, named or nameless. Raises BlockStateError for
        one that is neither, using none.
        """
        for block in blocks:
            if self._states[block] not in {_SHARED, _NAMELESS}:
                raise BlockStateError(block, _STATES[self._states[block]], "shared or nameless")
        for block in blocks:
            self._users[block] += 1
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Use so many private blocks, evicting what is needed; None, and nothing done, if not."""
        if count > self.available_blocks:
            return None
        while len(self._free) < count:
            self._evict()
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._states[block] = _PRIVATE
            self._users[block] = 1
        self.counters.allocations += count
        return blocks

    def register(
        self, blocks: Sequence[int], names: Sequence[BlockName], priority: int = 0
    ) -> list[int]:
        """Name private blocks by what they hold; the blocks to use from now on in their places.

        Raises BlockStateError for one that is not private, naming none.
        """
        for block in blocks:
            if self._states[block] != _PRIVATE:
                raise BlockStateError(block, _STATES[self._states[block]], "a private block")
        self._eviction.note_uses(name.identity for name in names)
        return [self._register(*each, priority) for each in zip(blocks, names, strict=True)]

    def adopt(self, block: int, name: BlockName) -> bool:
        """Keep a free block under a name that a former life gave it; False if it is not free, or
        another has the name. O(free blocks).
        """
        if self._states[block] != _FREE or name.identity in self._by_identity:
            return False
        self._free.remove(block)
        self._states[block] = _PRIVATE
        self._users[block] = 1
        self.release([self._register(block, name, 0)])
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """Use these blocks, in prompt order, no longer. Raises BlockStateError for one that has
        no user left, releasing none of those before it.
        """
        users = self._users
        for position in range(len(blocks) - 1, -1, -1):
            block = blocks[position]
            if not users[block]:
                raise BlockStateError(block, _STATES[self._states[block]], "a block in use")
            users[block] -= 1
            if not users[block]:
                self._retire(block)

    # ── Tending ──────────────────────────────────────────────────────────────────────────────────

    def touch(self, identities: Sequence[bytes]) -> int:
        """Treat the leading blocks of a prompt as if they were used now; how many there are."""
        blocks = self.match(identities)
        self.release(blocks)
        return len(blocks)

    def reset(self) -> None:
        """Give up every name. Raises PoolInUseError while blocks are in use."""
        if self.used_blocks:
            raise PoolInUseError(self.num_blocks, self.available_blocks)
        self.clear()

    def reset_blocks(self, identities: Iterable[bytes]) -> ResetOutcome:
        """Give up these names, as far as nobody uses them."""
        outcome = ResetOutcome([], [], [])
        for identity in identities:
            block = self._by_identity.get(identity)
            if block is None:
                outcome.not_found.append(identity)
            elif self._users[block]:
                outcome.not_reset.append(identity)
            else:
                self._eviction.remove(block)
                self._forget(block)
                outcome.reset_blocks.append(identity)
        return outcome

    def clear(self) -> None:
        """Take every name away; blocks in use go on without."""
        while len(self._eviction):
            self._forget(self._eviction.pop())
        for block in self._by_identity.values():
            self._names[block] = None
            self._states[block] = _NAMELESS
        self._by_identity.clear()
        self._changes = [CacheCleared()]

    def take_changes(self) -> list[Change]:
        """What happened to names since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(blocks)."""
        states = self._states
        assert sorted(self._free) == [b for b in range(self.num_blocks) if states[b] == _FREE]
        assert len(self._eviction) == states.count(_UNUSED)
        self._eviction.check_invariants()
        for block, (users, name) in enumerate(zip(self._users, self._names, strict=True)):
            state = states[block]
            assert (users > 0) == (state in {_PRIVATE, _SHARED, _NAMELESS})
            assert users == 1 or state != _PRIVATE
            assert (name is not None) == (state in {_SHARED, _UNUSED})
            assert name is None or self._by_identity[name.identity] == block
        assert len(self._by_identity) == states.count(_SHARED) + states.count(_UNUSED)

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _use_known(self, identities: Sequence[bytes]) -> list[int]:
        blocks = [self._by_identity[identity] for identity in identities]
        self._eviction.note_uses(identities)
        for block in blocks:
            self._use(block)
        self.counters.matched += len(blocks)
        return blocks

    def _use(self, block: int) -> None:
        if not self._users[block]:
            self._eviction.remove(block)
            self._states[block] = _SHARED
        self._users[block] += 1

    def _register(self, block: int, name: BlockName, priority: int) -> int:
        identity = name.identity
        known = self._by_identity.get(identity)
        if known is not None:
            return self._register_duplicate(block, known)
        self._states[block] = _SHARED
        self._names[block] = name
        self._priorities[block] = priority
        self._by_identity[identity] = block
        self._changes.append(BlockStored(name))
        self.counters.registrations += 1
        return block

    def _register_duplicate(self, block: int, known: int) -> int:
        self.counters.duplicates += 1
        if self._duplicates is Duplicates.KEPT:
            self._states[block] = _NAMELESS
            return block
        self._use(known)
        self.release([block])
        return known

    def _retire(self, block: int) -> None:
        name = self._names[block]
        if name is None:
            self._states[block] = _FREE
            self._free.append(block)
            return
        self._tick += 1
        self._states[block] = _UNUSED
        priority = self._priorities[block]
        self._eviction.add(block, Unused(name, priority, self._tick))

    def _evict(self) -> None:
        self._forget(self._eviction.pop())
        self.counters.evictions += 1

    def _forget(self, block: int) -> None:
        name = self._names[block]
        assert name is not None
        self._names[block] = None
        self._states[block] = _FREE
        del self._by_identity[name.identity]
        self._free.append(block)
        self._changes.append(BlockRemoved(name))
