"""The state of every block of a pool, and the steps from one state to the next.

A step takes blocks that are in the state it begins with, and checks nothing: its caller
(`BlockPool`) has checked them.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared, Change
from worker_agent.blocks.eviction.base import Eviction, Unused
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool_values import FREE, NAMELESS, PRIVATE, SHARED, UNUSED


class BlockLedger:
    """The states of blocks 0 to `num_blocks` - 1.

    Invariants: a name leads to one block and back; a block has users exactly if it is private,
    shared or nameless, and one if it is private; the eviction policy has exactly the unused blocks.
    """

    __slots__ = (
        "acquired_ticks",
        "by_identity",
        "changes",
        "eviction",
        "free",
        "names",
        "priorities",
        "returned_ticks",
        "states",
        "tick",
        "users",
    )

    def __init__(self, num_blocks: int, eviction: Eviction) -> None:
        self.free = deque(range(num_blocks))
        self.states = bytearray(num_blocks)
        self.users = [0] * num_blocks
        self.priorities = [0] * num_blocks
        self.acquired_ticks = [0] * num_blocks
        self.returned_ticks = [0] * num_blocks
        self.names: list[BlockName | None] = [None] * num_blocks
        self.by_identity: dict[bytes, int] = {}
        self.eviction = eviction
        self.changes: list[Change] = []
        self.tick = 0

    # ── Lookups ──────────────────────────────────────────────────────────────────────────────────

    def found(self, identities: Iterable[bytes]) -> list[int | None]:
        """Return the block of each identity, or None if there is none."""
        return list(map(self.by_identity.get, identities))

    def leading(self, identities: Iterable[bytes]) -> list[int]:
        """Return the leading blocks that are in the pool. O(matches)."""
        known, blocks = self.by_identity, []
        for identity in identities:
            block = known.get(identity)
            if block is None:
                break
            blocks.append(block)
        return blocks

    # ── Steps ────────────────────────────────────────────────────────────────────────────────────

    def take(self, count: int) -> list[int]:
        """Make free blocks private, and return them."""
        popleft = self.free.popleft
        blocks = [popleft() for _ in range(count)]
        self._acquire(blocks)
        return blocks

    def claim(self, blocks: Iterable[int]) -> list[int]:
        """Make those of these blocks private that are free, and return them. O(pool size)."""
        claimed = [block for block in blocks if self.states[block] == FREE]
        self._acquire(claimed)
        self.free = deque(block for block in self.free if self.states[block] == FREE)
        return claimed

    def use(self, blocks: Sequence[int]) -> None:
        """Add a user to unused or shared blocks."""
        users, returned = self.users, []
        for block in blocks:
            if not users[block]:
                returned.append(block)
                self.states[block] = SHARED
            users[block] += 1
        if returned:
            self.tick += 1
            for block in returned:
                self.acquired_ticks[block] = self.tick
            self.eviction.remove(returned)

    def name(
        self,
        blocks: Sequence[int],
        names: Sequence[BlockName],
        identities: Sequence[bytes],
        priority: int,
    ) -> None:
        """Make private blocks shared, under names that no block has yet."""
        for block, name in zip(blocks, names, strict=True):
            self.states[block] = SHARED
            self.names[block] = name
            self.priorities[block] = priority
        self.by_identity.update(zip(identities, blocks, strict=True))
        self.changes.extend(map(BlockStored, names))

    def retire(self, blocks: Sequence[int]) -> None:
        """Make blocks without users unused if they have a name, free if they have none."""
        named, unused = [], []
        tick = self.tick
        for block in blocks:
            name = self.names[block]
            if name is None:
                self.states[block] = FREE
                self.free.append(block)
                continue
            tick += 1
            self.states[block] = UNUSED
            self.returned_ticks[block] = tick
            named.append(block)
            unused.append(Unused(name, self.priorities[block], tick))
        self.tick = tick
        self.eviction.add(named, unused)

    def evict(self, count: int) -> None:
        """Free `count` unused blocks."""
        self._free_unused(self.eviction.pop(count))

    def forget(self, block: int) -> None:
        """Remove a block's name: it becomes nameless while it is in use, else free."""
        if self.users[block]:
            self._unname([block])
            self.states[block] = NAMELESS
            return
        self.eviction.remove([block])
        self._free_unused([block])

    def clear(self) -> None:
        """Remove all names, recorded as one change."""
        self._free_unused(self.eviction.pop(len(self.eviction)))
        for block in self.by_identity.values():
            self.names[block] = None
            self.priorities[block] = 0
            self.states[block] = NAMELESS
        self.by_identity.clear()
        self.changes = [CacheCleared()]

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(blocks)."""
        states = self.states
        assert sorted(self.free) == [b for b in range(len(states)) if states[b] == FREE]
        assert len(self.eviction) == states.count(UNUSED)
        self.eviction.check_invariants()
        for block, (users, name) in enumerate(zip(self.users, self.names, strict=True)):
            state = states[block]
            assert (users > 0) == (state in {PRIVATE, SHARED, NAMELESS})
            assert users == 1 or state != PRIVATE
            assert (name is not None) == (state in {SHARED, UNUSED})
            assert name is None or self.by_identity[name.identity] == block
        assert len(self.by_identity) == states.count(SHARED) + states.count(UNUSED)

    # ── Helpers ──────────────────────────────────────────────────────────────────────────────────

    def _acquire(self, blocks: Sequence[int]) -> None:
        states, users, ticks = self.states, self.users, self.acquired_ticks
        self.tick += 1
        for block in blocks:
            states[block] = PRIVATE
            users[block] = 1
            ticks[block] = self.tick

    def _free_unused(self, blocks: Sequence[int]) -> None:
        """Free blocks that the eviction policy has given up."""
        self._unname(blocks)
        for block in blocks:
            self.states[block] = FREE
        self.free.extend(blocks)

    def _unname(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            name = self.names[block]
            assert name is not None
            self.names[block] = None
            self.priorities[block] = 0
            del self.by_identity[name.identity]
            self.changes.append(BlockRemoved(name))
