"""The block pool of one tier: the content and the users of each block, and the eviction.

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

- private: in use, and to be named.
- shared: in use, under its name.
- unused: not in use, and kept under its name.
- nameless: in use, and never to be named, because another block has the name, or it was removed.

Prompts are released tail first, so that a suffix is evicted before the prefix that it needs.
"""

from collections.abc import Iterable, Sequence

from worker_agent.blocks.changes import Change
from worker_agent.blocks.errors import BlockStateError, PoolInUseError
from worker_agent.blocks.eviction.base import Eviction
from worker_agent.blocks.ledger import BlockLedger
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool_values import (
    NAMELESS,
    PRIVATE,
    SHARED,
    STATES,
    BlockMetadata,
    Duplicates,
    NamedBlocks,
    PoolCounters,
    PoolStatus,
    ResetOutcome,
)


class BlockPool:
    """Blocks 0 to `num_blocks` - 1, by number: the base of handles and engines.

    Every call either succeeds or changes nothing.
    """

    __slots__ = ("_duplicates", "_ledger", "counters")

    def __init__(
        self, num_blocks: int, eviction: Eviction, duplicates: Duplicates = Duplicates.REJECTED
    ) -> None:
        self._ledger = BlockLedger(num_blocks, eviction)
        self._duplicates = duplicates
        self.counters = PoolCounters()

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self._ledger.users)

    @property
    def available_blocks(self) -> int:
        """The number of blocks that could be allocated now: free or unused."""
        return len(self._ledger.free) + len(self._ledger.eviction)

    @property
    def used_blocks(self) -> int:
        """The number of blocks in use."""
        return self.num_blocks - self.available_blocks

    @property
    def status(self) -> PoolStatus:
        """The numbers of active, inactive and empty blocks."""
        return PoolStatus(self.used_blocks, len(self._ledger.eviction), len(self._ledger.free))

    def name(self, block: int) -> BlockName | None:
        """Return the name of a block. Returns None if it has none."""
        return self._ledger.names[block]

    def state(self, block: int) -> str:
        """Return the state of a block, as in the module's docstring."""
        return STATES[self._ledger.states[block]]

    def metadata(self, block: int) -> BlockMetadata:
        """Return a block's priority, and the ticks of its last release and allocation."""
        of = self._ledger
        return BlockMetadata(
            of.priorities[block], of.returned_ticks[block], of.acquired_ticks[block]
        )

    @property
    def private_blocks(self) -> int:
        """The number of blocks in use that are to be named. O(blocks), of a byte each."""
        return self._ledger.states.count(PRIVATE)

    # ── Lookups ──────────────────────────────────────────────────────────────────────────────────

    def matching(self, identities: Sequence[bytes]) -> int:
        """Return the number of leading blocks in the pool. Mutates nothing. O(matches)."""
        return len(self._ledger.leading(identities))

    def scan(self, identities: Iterable[bytes]) -> list[int | None]:
        """Return the block of each identity, or None. Mutates nothing but counters."""
        found = self._ledger.found(identities)
        self.counters.scanned += len(found)
        self.counters.found += len(found) - found.count(None)
        return found

    def named(self) -> NamedBlocks:
        """Return all named blocks, as of now. O(blocks)."""
        return NamedBlocks(list(self._ledger.names), bytes(self._ledger.states))

    # ── Use ──────────────────────────────────────────────────────────────────────────────────────

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """Use the leading blocks of a prompt that are in the pool. O(matches)."""
        blocks = self._ledger.leading(identities)
        self._use_asked(blocks, identities[: len(blocks)], len(identities))
        return blocks

    def match_scattered(self, identities: Sequence[bytes]) -> list[int | None]:
        """Use those of these blocks that are in the pool, also after gaps."""
        found = self._ledger.found(identities)
        here = [(block, i) for block, i in zip(found, identities, strict=True) if block is not None]
        self._use_asked([block for block, _ in here], [i for _, i in here], len(identities))
        return found

    def hold(self, identities: Sequence[bytes]) -> list[int | None]:
        """Use those of these blocks that are in the pool, as `match_scattered` does.

        No request needs them: this counts toward no hit rate and no frequency.
        """
        found = self._ledger.found(identities)
        self._ledger.use([block for block in found if block is not None])
        return found

    def use_again(self, blocks: Sequence[int]) -> Sequence[int]:
        """Add a user to blocks in use, named or nameless.

        Raises BlockStateError for a block that is neither, using none.
        """
        states, users = self._ledger.states, self._ledger.users
        for block in blocks:
            if states[block] not in {SHARED, NAMELESS}:
                raise BlockStateError(block, STATES[states[block]], "shared or nameless")
        for block in blocks:
            users[block] += 1
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Use `count` private blocks, evicting unused ones. Returns None if there are too few."""
        if count > self.available_blocks:
            return None
        lacking = count - len(self._ledger.free)
        if lacking > 0:
            self._ledger.evict(lacking)
            self.counters.evictions += lacking
        self.counters.allocations += count
        return self._ledger.take(count)

    def claim(self, blocks: Iterable[int]) -> list[int]:
        """Use those of these blocks that are free; a former process has filled them.

        They are private until they are registered, or released. O(blocks).
        """
        return self._ledger.claim(blocks)

    def register(
        self, blocks: Sequence[int], names: Sequence[BlockName], priority: int = 0
    ) -> list[int]:
        """Name private blocks by their content; return the blocks to use in their places.

        Raises BlockStateError for one that is not private, naming none.
        """
        self._check_private(blocks)
        identities = [name.identity for name in names]
        self._ledger.eviction.note_uses(identities)
        are_new = self._ledger.by_identity.keys().isdisjoint(identities)
        if are_new and len(set(identities)) == len(blocks):
            self._name(blocks, names, identities, priority)
            return list(blocks)
        return [
            self._register_one(*each, priority)
            for each in zip(blocks, names, identities, strict=True)
        ]

    def release(self, blocks: Sequence[int]) -> None:
        """Stop using these blocks, in prompt order.

        Raises BlockStateError for a block without users, releasing none.
        """
        users, retired = self._ledger.users, []
        for position in range(len(blocks) - 1, -1, -1):
            block = blocks[position]
            left = users[block] - 1
            if left < 0:
                for each in blocks[position + 1 :]:
                    users[each] += 1
                raise BlockStateError(block, self.state(block), "a block in use")
            users[block] = left
            if not left:
                retired.append(block)
        self._ledger.retire(retired)

    # ── Maintenance ──────────────────────────────────────────────────────────────────────────────

    def touch(self, identities: Sequence[bytes]) -> int:
        """Mark the leading blocks of a prompt as used now; return their number."""
        blocks = self.match(identities)
        self.release(blocks)
        return len(blocks)

    def reset(self) -> None:
        """Remove all names. Raises PoolInUseError while blocks are in use."""
        if self.used_blocks:
            raise PoolInUseError(self.num_blocks, self.available_blocks)
        self.clear()

    def reset_blocks(self, identities: Iterable[bytes]) -> ResetOutcome:
        """Remove these names, except those of blocks in use."""
        outcome = ResetOutcome([], [], [])
        for identity in identities:
            [block] = self._ledger.found([identity])
            if block is None:
                outcome.not_found.append(identity)
            elif self._ledger.users[block]:
                outcome.not_reset.append(identity)
            else:
                self._ledger.forget(block)
                outcome.reset_blocks.append(identity)
        return outcome

    def forget(self, identities: Iterable[bytes]) -> int:
        """Remove these names, because their content is wrong; return their number.

        Blocks in use stay in use without a name.
        """
        found = self._ledger.found(dict.fromkeys(identities))
        known = [block for block in found if block is not None]
        for block in known:
            self._ledger.forget(block)
        return len(known)

    def clear(self) -> None:
        """Remove all names; blocks in use stay in use without one."""
        self._ledger.clear()

    def take_changes(self) -> list[Change]:
        """Return the changes of names since the last call, in order."""
        changes, self._ledger.changes = self._ledger.changes, []
        return changes

    def check_invariants(self) -> None:
        """Assert the invariants of the ledger. O(blocks)."""
        self._ledger.check_invariants()

    # ── Helpers ──────────────────────────────────────────────────────────────────────────────────

    def _use_asked(
        self, blocks: Sequence[int], identities: Sequence[bytes], requested: int
    ) -> None:
        self._ledger.eviction.note_uses(identities)
        self._ledger.use(blocks)
        self.counters.requested += requested
        self.counters.matched += len(blocks)

    def _check_private(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._ledger.states[block] != PRIVATE:
                raise BlockStateError(block, self.state(block), "a private block")
        if len(set(blocks)) < len(blocks):
            twice = next(block for block in blocks if blocks.count(block) > 1)
            raise BlockStateError(twice, "listed twice", "each block once")

    def _register_one(self, block: int, name: BlockName, identity: bytes, priority: int) -> int:
        [known] = self._ledger.found([identity])
        if known is None:
            self._name([block], [name], [identity], priority)
            return block
        self.counters.duplicates += 1
        if self._duplicates is Duplicates.KEPT:
            self.counters.kept_duplicates += 1
            self._ledger.states[block] = NAMELESS
            return block
        self._ledger.use([known])
        self.release([block])
        return known

    def _name(
        self,
        blocks: Sequence[int],
        names: Sequence[BlockName],
        identities: Sequence[bytes],
        priority: int,
    ) -> None:
        self._ledger.name(blocks, names, identities, priority)
        self.counters.registrations += len(blocks)
