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

from collections.abc import Iterable, Sequence

from router.block_errors import BlockStateError, PoolInUseError
from worker_agent.blocks.changes import Change
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
    """Blocks 0 to `num_blocks` - 1, by number: what handles and engines are built on.

    Every call is done whole or not at all.
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
        """All blocks."""
        return len(self._ledger.users)

    @property
    def available_blocks(self) -> int:
        """Blocks that could be allocated now: free or unused."""
        return len(self._ledger.free) + len(self._ledger.eviction)

    @property
    def used_blocks(self) -> int:
        """Blocks in use by somebody."""
        return self.num_blocks - self.available_blocks

    @property
    def status(self) -> PoolStatus:
        """All blocks, by what becomes of them."""
        return PoolStatus(self.used_blocks, len(self._ledger.eviction), len(self._ledger.free))

    def name(self, block: int) -> BlockName | None:
        """What a block is called, if it has a name."""
        return self._ledger.names[block]

    def state(self, block: int) -> str:
        """Which of the states in the module's docstring."""
        return STATES[self._ledger.states[block]]

    def metadata(self, block: int) -> BlockMetadata:
        """Its priority, and when it was last given back and taken: counts that grow."""
        of = self._ledger
        return BlockMetadata(
            of.priorities[block], of.returned_ticks[block], of.acquired_ticks[block]
        )

    @property
    def private_blocks(self) -> int:
        """Blocks in use that are to be named. O(blocks), of a byte each."""
        return self._ledger.states.count(PRIVATE)

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────

    def matching(self, identities: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are here. Mutates nothing. O(matches)."""
        return len(self._ledger.leading(identities))

    def scan(self, identities: Iterable[bytes]) -> list[int | None]:
        """The block that holds each of these, if one does. Mutates nothing but what it counts."""
        found = self._ledger.found(identities)
        self.counters.scanned += len(found)
        self.counters.found += len(found) - found.count(None)
        return found

    def named(self) -> NamedBlocks:
        """All named blocks, as of now. O(blocks)."""
        return NamedBlocks(list(self._ledger.names), bytes(self._ledger.states))

    # ── Using ────────────────────────────────────────────────────────────────────────────────────

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """Use the leading blocks of a prompt that are here. O(matches)."""
        blocks = self._ledger.leading(identities)
        self._use_asked(blocks, identities[: len(blocks)], len(identities))
        return blocks

    def match_scattered(self, identities: Sequence[bytes]) -> list[int | None]:
        """Use those of these blocks that are here, wherever there are gaps."""
        found = self._ledger.found(identities)
        here = [(block, i) for block, i in zip(found, identities, strict=True) if block is not None]
        self._use_asked([block for block, _ in here], [i for _, i in here], len(identities))
        return found

    def hold(self, identities: Sequence[bytes]) -> list[int | None]:
        """The same, but nobody asked for them: it counts for no rate and no frequency."""
        found = self._ledger.found(identities)
        self._ledger.use([block for block in found if block is not None])
        return found

    def use_again(self, blocks: Sequence[int]) -> Sequence[int]:
        """Another user of blocks that are in use, named or nameless. Raises BlockStateError for
        one that is neither, using none.
        """
        states, users = self._ledger.states, self._ledger.users
        for block in blocks:
            if states[block] not in {SHARED, NAMELESS}:
                raise BlockStateError(block, STATES[states[block]], "shared or nameless")
        for block in blocks:
            users[block] += 1
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Use so many private blocks, evicting what is needed; None, and nothing done, if not."""
        if count > self.available_blocks:
            return None
        lacking = count - len(self._ledger.free)
        if lacking > 0:
            self._ledger.evict(lacking)
            self.counters.evictions += lacking
        self.counters.allocations += count
        return self._ledger.take(count)

    def claim(self, blocks: Iterable[int]) -> list[int]:
        """Use these blocks, which a former life has filled, as far as they are free: they are
        private until they are registered, or released. O(blocks).
        """
        return self._ledger.claim(blocks)

    def register(
        self, blocks: Sequence[int], names: Sequence[BlockName], priority: int = 0
    ) -> list[int]:
        """Name private blocks by what they hold; the blocks to use from now on in their places.

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
        """Use these blocks, in prompt order, no longer. Raises BlockStateError for one that has
        no user left, releasing none.
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
        """Take these names away: what is kept under them is wrong. Blocks in use go on without;
        how many there were.
        """
        found = self._ledger.found(dict.fromkeys(identities))
        known = [block for block in found if block is not None]
        for block in known:
            self._ledger.forget(block)
        return len(known)

    def clear(self) -> None:
        """Take every name away; blocks in use go on without."""
        self._ledger.clear()

    def take_changes(self) -> list[Change]:
        """What happened to names since the last call, in order."""
        changes, self._ledger.changes = self._ledger.changes, []
        return changes

    def check_invariants(self) -> None:
        """Assert those of the ledger. O(blocks)."""
        self._ledger.check_invariants()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

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
            raise BlockStateError(twice, "there twice", "each block once")

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
