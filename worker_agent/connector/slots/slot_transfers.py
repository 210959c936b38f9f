"""The transfers of one request: loads from lower tiers, and stores into them."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.values import Tier
from worker_agent.blocks.names import BlockName, Naming
from worker_agent.connector.slots.block_groups import BlockGroup, BlockGroups
from worker_agent.connector.slots.errors import SlotOperationError, SlotPoolError
from worker_agent.connector.slots.held_groups import NOTHING_HELD, hold_groups
from worker_agent.connector.slots.held_prefix import LowerTier
from worker_agent.connector.slots.protocol import (
    IterationComplete,
    Operation,
    RequestType,
    TransferKind,
)
from worker_agent.connector.slots.slot_blocks import NO_BLOCK, SlotBlocks
from worker_agent.connector.slots.transfer_ledger import TransferLedger


class SlotFacts(Struct, frozen=True):
    """Properties common to all slots of a connector."""

    groups: BlockGroups
    """The engine's KV cache groups."""
    tiers: tuple[LowerTier, ...]
    """Tiers, fastest first; if there are none, no block is loaded or stored."""
    naming: Naming
    uuids: Iterator[int]
    """Unique numbers for transfers."""
    deadline_s: float
    """Time after which a transfer is not waited for any more."""


_Moved: TypeAlias = tuple[list[BlockName], list[int]]
"""Names, and the engine's block of each."""


class SlotTransfers:
    """The transfers of one slot.

    Invariant: blocks in lower tiers are held exactly from `stage` until their loads are done, or
    they are not needed any more.

    Full attention's blocks are stored when they are full. Those of windows are stored where a later
    prompt can be expected to resume: before the prompt's last token, and where this prompt found
    full attention's blocks and no window's.
    """

    __slots__ = (
        "_blocks",
        "_boundaries",
        "_facts",
        "_full_at",
        "_held",
        "_stored_tokens",
        "_window_tokens",
        "ledger",
    )

    def __init__(self, blocks: SlotBlocks, facts: SlotFacts) -> None:
        self.ledger = TransferLedger()
        self._blocks = blocks
        self._facts = facts
        self._held = NOTHING_HELD
        self._boundaries = {blocks.last_boundary}
        self._full_at = 0
        """Number of tokens at which the next block may be full."""
        self._stored_tokens = 0
        self._window_tokens = 0

    @property
    def held_tokens(self) -> int:
        """Number of tokens of which the blocks are held in lower tiers."""
        return self._held.end - self._held.start if self._held.num_blocks else 0

    @property
    def staged_after_tokens(self) -> int:
        """Number of the engine's tokens before the staged ones."""
        return self._held.start

    @property
    def right_tokens(self) -> int:
        """Number of leading tokens that the engine has; valid once the loads are done."""
        if not self.ledger.failed_blocks:
            return self._held.end
        groups = self._facts.groups
        verified_blocks = self.ledger.verified_blocks if groups.is_single else 0
        return self._held.start + verified_blocks * groups.unit

    def names_behind(self, num_computed: int, known_tokens: int, limit: int) -> list[BlockName]:
        """See `Slot.names_behind`."""
        groups, end = self._facts.groups, self._blocks.last_boundary
        found: list[BlockName] = []
        for index, group in (*groups.full, *groups.windows):
            size, first = group.block_size, known_tokens // group.block_size
            if group.window is not None:
                first = max(group.first_needed(known_tokens), num_computed // size)
            last = min(end // size, first + limit - len(found))
            found += self._blocks.names(index, first, max(first, last))
        return found

    def stage(self, num_tokens: int) -> bool:
        """Hold the blocks in lower tiers behind the first `num_tokens`. Raises SlotPoolError.

        Returns False if there are none. At least one token is left to be computed.
        """
        groups = self._facts.groups
        try:
            self._held = hold_groups(self._facts.tiers, self._blocks, groups, num_tokens)
        except KvRouterError as error:
            raise SlotPoolError(error) from error
        if self._held.full_end > self._held.end:
            self._boundaries.add(self._held.full_end)
        return self._held.num_blocks > 0

    def release(self) -> None:
        """Release the held blocks; calling it again has no effect."""
        self._held.release()

    def load(self) -> None:
        """Load the held blocks: one transfer per tier, or one of all groups together.

        Raises SlotOperationError if the request has too few device blocks.
        """
        names, blocks = self._of_groups((part.group, part.places) for part in self._held.parts)
        runs = [run for part in self._held.parts for run in part.blocks.runs]
        if not self._facts.groups.is_single:
            slowest = max(tier for tier, _ in runs)
            self._add(TransferKind.LOAD, slowest, (names, blocks), is_whole=True)
            return
        first = 0
        for tier, count in runs:
            run = slice(first, first + count)
            self._add(TransferKind.LOAD, tier, (names[run], blocks[run]))
            first += count

    def store(self, num_computed: int, end: int, iteration: int) -> None:
        """Store the blocks that are full at `end`, as far as not stored yet, after the iteration.

        `num_computed`: number of tokens computed before the iteration.
        """
        if end < self._full_at or not self._facts.tiers:
            return
        unit = self._facts.groups.unit
        self._full_at = end - end % unit + unit
        tier, after = self._facts.tiers[0].tier, IterationComplete(iteration)
        self._add(TransferKind.STORE, tier, self._full_blocks(end), after)
        if self._facts.groups.windows:
            passing = self._passing_blocks(num_computed, end)
            self._add(TransferKind.STORE, tier, passing, after, is_urgent=True)
        self._stored_tokens = max(self._stored_tokens, end)
        self._window_tokens = max(self._window_tokens, end)

    def skip_stored(self, tokens: int) -> None:
        """Treat the first `tokens` tokens as stored: the request did not compute them itself."""
        self._stored_tokens = max(self._stored_tokens, tokens)

    def forget_stored(self, tokens: int) -> None:
        """Treat all blocks behind the first `tokens` tokens as not stored."""
        self._full_at = 0
        self._stored_tokens = min(self._stored_tokens, tokens)
        self._window_tokens = min(self._window_tokens, tokens)

    def _full_blocks(self, end: int) -> _Moved:
        """Return full attention's blocks that are full and not stored yet."""
        sizes = [(index, group.block_size) for index, group in self._facts.groups.full]
        stored = self._stored_tokens
        places = ((index, slice(stored // size, end // size)) for index, size in sizes)
        return self._of_groups((index, each) for index, each in places if each.start < each.stop)

    def _passing_blocks(self, num_computed: int, end: int) -> _Moved:
        """Return the windows' blocks before boundaries that are full and not stored yet.

        They are the request's until the next iteration. Of a request that begins, those that the
        engine had are among them.
        """
        names: list[BlockName] = []
        blocks: list[int] = []
        for index, group in self._facts.groups.windows:
            device = self._blocks.device_blocks[index]
            for place in self._window_places(group, num_computed, end):
                if device[place] != NO_BLOCK:
                    names += self._blocks.names(index, place, place + 1)
                    blocks.append(device[place])
        return names, blocks

    def _window_places(self, group: BlockGroup, num_computed: int, end: int) -> list[int]:
        size = group.block_size
        low = max(self._window_tokens // size, group.first_needed(num_computed))
        places: set[int] = set()
        for boundary in self._boundaries:
            first = max(low, group.first_needed(boundary))
            places.update(range(first, min(boundary, end) // size))
        return sorted(places)

    def _of_groups(self, parts: Iterable[tuple[int, slice]]) -> _Moved:
        """Return the blocks of each group at these places, one group after another."""
        names: list[BlockName] = []
        blocks: list[int] = []
        for group, places in parts:
            more = self._of_group(group, places)
            names += more[0]
            blocks += more[1]
        return names, blocks

    def _of_group(self, group: int, places: slice) -> _Moved:
        """Return a group's blocks. Raises SlotOperationError if the request lacks one."""
        device = self._blocks.device_blocks[group]
        blocks = device[places]
        if len(device) < places.stop:
            key, needed = self._blocks.key, f"at least {places.stop}"
            raise SlotOperationError(key, "device_blocks", f"{len(device)}", needed)
        if not self._facts.groups.is_single and NO_BLOCK in blocks:
            raise SlotOperationError(self._blocks.key, "device_blocks", "one passed", "all needed")
        return self._blocks.names(group, places.start, places.stop), blocks

    def _add(
        self,
        kind: TransferKind,
        tier: Tier,
        moved: _Moved,
        after: IterationComplete | None = None,
        *,
        is_whole: bool = False,
        is_urgent: bool = False,
    ) -> None:
        names, blocks = moved
        if not names:
            return
        self.ledger.add(
            Operation(
                next(self._facts.uuids),
                self._blocks.key,
                kind,
                RequestType.IMMEDIATE if after is None else RequestType.SCHEDULED,
                tier,
                tuple(names),
                tuple(blocks),
                after,
                is_whole,
                is_urgent,
            )
        )
