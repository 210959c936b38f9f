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

from router.block_errors import BlockStateError, PoolInUseError
from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared, Change
from worker_agent.blocks.eviction.base import Eviction, Unused
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool_values import (
    FREE,
    NAMELESS,
    PRIVATE,
    SHARED,
    STATES,
    UNUSED,
    BlockMetadata,
    Duplicates,
    NamedBlocks,
    PoolCounters,
    PoolStatus,
    ResetOutcome,
)


class BlockPool:
    """Blocks 0 to `num_blocks` - 1, by number: what handles and engines are built on.

    Every call is done whole or not at all. Invariants: a name leads to one block and back; a block
    has users exactly if it is private, shared or nameless, and one if it is private; the eviction
    policy has exactly the unused blocks.
    """

    __slots__ = (
        "_acquired_ticks",
        "_by_identity",
        "_changes",
        "_duplicates",
        "_eviction",
        "_free",
        "_names",
        "_priorities",
        "_returned_ticks",
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
        self._acquired_ticks = [0] * num_blocks
        self._returned_ticks = [0] * num_blocks
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

    def state(self, block: int) -> str:
        """Which of the states in the module's docstring."""
        return STATES[self._states[block]]

    def metadata(self, block: int) -> BlockMetadata:
        """Its priority, and when it was last given back and taken: counts that grow."""
        return BlockMetadata(
            self._priorities[block], self._returned_ticks[block], self._acquired_ticks[block]
        )

    @property
    def private_blocks(self) -> int:
        """Blocks in use that are to be named. O(blocks), of a byte each."""
        return self._states.count(PRIVATE)

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────

    def matching(self, identities: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are here. Mutates nothing. O(matches)."""
        return len(self._leading(identities))

    def scan(self, identities: Iterable[bytes]) -> list[int | None]:
        """The block that holds each of these, if one does. Mutates nothing but what it counts."""
        found = self._found(identities)
        self.counters.scanned += len(found)
        self.counters.found += len(found) - found.count(None)
        return found

    def named(self) -> "NamedBlocks":
        """All named blocks, as of now. O(blocks)."""
        return NamedBlocks(list(self._names), bytes(self._states))

    # ── Using ────────────────────────────────────────────────────────────────────────────────────

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """Use the leading blocks of a prompt that are here. O(matches)."""
        blocks = self._leading(identities)
        self.counters.requested += len(identities)
        self._use_asked(blocks, identities[: len(blocks)])
        return blocks

    def match_scattered(self, identities: Sequence[bytes]) -> list[int | None]:
        """Use those of these blocks that are here, wherever there are gaps."""
        found = self._found(identities)
        known = [identity for identity in identities if identity in self._by_identity]
        self.counters.requested += len(identities)
        self._use_asked([block for block in found if block is not None], known)
        return found

    def hold(self, identities: Sequence[bytes]) -> list[int | None]:
        """The same, but nobody asked for them: it counts for no rate and no frequency."""
        found = self._found(identities)
        self._use([block for block in found if block is not None])
        return found

    def use_again(self, blocks: Sequence[int]) -> Sequence[int]:
        """Another user of blocks that are in use, named or nameless. Raises BlockStateError for
        one that is neither, using none.
        """
        for block in blocks:
            if self._states[block] not in {SHARED, NAMELESS}:
                raise BlockStateError(block, STATES[self._states[block]], "shared or nameless")
        for block in blocks:
            self._users[block] += 1
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Use so many private blocks, evicting what is needed; None, and nothing done, if not."""
        if count > self.available_blocks:
            return None
        if count > len(self._free):
            self._evict(count - len(self._free))
        take, states, users = self._free.popleft, self._states, self._users
        blocks = [take() for _ in range(count)]
        self._tick += 1
        for block in blocks:
            states[block] = PRIVATE
            users[block] = 1
            self._acquired_ticks[block] = self._tick
        self.counters.allocations += count
        return blocks

    def register(
        self, blocks: Sequence[int], names: Sequence[BlockName], priority: int = 0
    ) -> list[int]:
        """Name private blocks by what they hold; the blocks to use from now on in their places.

        Raises BlockStateError for one that is not private, naming none.
        """
        for block in blocks:
            if self._states[block] != PRIVATE:
                raise BlockStateError(block, STATES[self._states[block]], "a private block")
        if len(set(blocks)) < len(blocks):
            twice = next(block for block in blocks if blocks.count(block) > 1)
            raise BlockStateError(twice, "there twice", "each block once")
        identities = [name.identity for name in names]
        self._eviction.note_uses(identities)
        are_new = self._by_identity.keys().isdisjoint(identities)
        if are_new and len(set(identities)) == len(blocks):
            self._name(blocks, names, identities, priority)
            return list(blocks)
        return [
            self._register_one(*each, priority)
            for each in zip(blocks, names, identities, strict=True)
        ]

    def adopt(self, entries: Sequence[tuple[int, BlockName]]) -> list[bool]:
        """Keep free blocks, in prompt order, under names that a former life gave them; False for
        one that is not free, or whose name another has. O(blocks).
        """
        kept, adopted = [], []
        for block, name in entries:
            is_kept = self._states[block] == FREE and name.identity not in self._by_identity
            kept.append(is_kept)
            if is_kept:
                self._states[block] = PRIVATE
                self._users[block] = 1
                self._name([block], [name], [name.identity], 0)
                adopted.append(block)
        self._free = deque(block for block in self._free if self._states[block] == FREE)
        self.release(adopted)
        return kept

    def release(self, blocks: Sequence[int]) -> None:
        """Use these blocks, in prompt order, no longer. Raises BlockStateError for one that has
        no user left, releasing none.
        """
        users, retired = self._users, []
        for position in range(len(blocks) - 1, -1, -1):
            block = blocks[position]
            left = users[block] - 1
            if left < 0:
                for each in blocks[position + 1 :]:
                    users[each] += 1
                raise BlockStateError(block, STATES[self._states[block]], "a block in use")
            users[block] = left
            if not left:
                retired.append(block)
        self._retire(retired)

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
                self._eviction.remove([block])
                self._forget([block])
                outcome.reset_blocks.append(identity)
        return outcome

    def forget(self, identities: Iterable[bytes]) -> int:
        """Take these names away: what is kept under them is wrong. Blocks in use go on without;
        how many there were.
        """
        known = [each for each in dict.fromkeys(identities) if each in self._by_identity]
        for identity in known:
            block = self._by_identity[identity]
            if self._users[block]:
                self._unname([block])
                self._states[block] = NAMELESS
            else:
                self._eviction.remove([block])
                self._forget([block])
        return len(known)

    def clear(self) -> None:
        """Take every name away; blocks in use go on without."""
        self._forget(self._eviction.pop(len(self._eviction)))
        for block in self._by_identity.values():
            self._names[block] = None
            self._priorities[block] = 0
            self._states[block] = NAMELESS
        self._by_identity.clear()
        self._changes = [CacheCleared()]

    def take_changes(self) -> list[Change]:
        """What happened to names since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(blocks)."""
        states = self._states
        assert sorted(self._free) == [b for b in range(self.num_blocks) if states[b] == FREE]
        assert len(self._eviction) == states.count(UNUSED)
        self._eviction.check_invariants()
        for block, (users, name) in enumerate(zip(self._users, self._names, strict=True)):
            state = states[block]
            assert (users > 0) == (state in {PRIVATE, SHARED, NAMELESS})
            assert users == 1 or state != PRIVATE
            assert (name is not None) == (state in {SHARED, UNUSED})
            assert name is None or self._by_identity[name.identity] == block
        assert len(self._by_identity) == states.count(SHARED) + states.count(UNUSED)

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _found(self, identities: Iterable[bytes]) -> list[int | None]:
        return [self._by_identity.get(identity) for identity in identities]

    def _leading(self, identities: Sequence[bytes]) -> list[int]:
        """The leading blocks that are here. O(matches)."""
        known, blocks = self._by_identity, []
        for identity in identities:
            block = known.get(identity)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _use_asked(self, blocks: Sequence[int], identities: Sequence[bytes]) -> None:
        self._eviction.note_uses(identities)
        self._use(blocks)
        self.counters.matched += len(blocks)

    def _use(self, blocks: Sequence[int]) -> None:
        users, returned = self._users, []
        for block in blocks:
            if not users[block]:
                returned.append(block)
                self._states[block] = SHARED
            users[block] += 1
        if returned:
            self._tick += 1
            for block in returned:
                self._acquired_ticks[block] = self._tick
            self._eviction.remove(returned)

    def _register_one(self, block: int, name: BlockName, identity: bytes, priority: int) -> int:
        known = self._by_identity.get(identity)
        if known is None:
            self._name([block], [name], [identity], priority)
            return block
        self.counters.duplicates += 1
        if self._duplicates is Duplicates.KEPT:
            self.counters.kept_duplicates += 1
            self._states[block] = NAMELESS
            return block
        self._use([known])
        self.release([block])
        return known

    def _name(
        self,
        blocks: Sequence[int],
        names: Sequence[BlockName],
        identities: Sequence[bytes],
        priority: int,
    ) -> None:
        """Private blocks become shared, under names that no block has."""
        for block, name in zip(blocks, names, strict=True):
            self._states[block] = SHARED
            self._names[block] = name
            self._priorities[block] = priority
        self._by_identity.update(zip(identities, blocks, strict=True))
        self._changes.extend(map(BlockStored, names))
        self.counters.registrations += len(blocks)

    def _retire(self, blocks: Sequence[int]) -> None:
        """Nobody uses these any more."""
        named, unused = [], []
        tick = self._tick
        for block in blocks:
            name = self._names[block]
            if name is None:
                self._states[block] = FREE
                self._free.append(block)
                continue
            tick += 1
            self._states[block] = UNUSED
            self._returned_ticks[block] = tick
            named.append(block)
            unused.append(Unused(name, self._priorities[block], tick))
        self._tick = tick
        self._eviction.add(named, unused)

    def _evict(self, count: int) -> None:
        self._forget(self._eviction.pop(count))
        self.counters.evictions += count

    def _forget(self, blocks: Sequence[int]) -> None:
        """Blocks that nobody uses lose their names, and are free."""
        self._unname(blocks)
        for block in blocks:
            self._states[block] = FREE
        self._free.extend(blocks)

    def _unname(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            name = self._names[block]
            assert name is not None
            self._names[block] = None
            self._priorities[block] = 0
            del self._by_identity[name.identity]
            self._changes.append(BlockRemoved(name))
