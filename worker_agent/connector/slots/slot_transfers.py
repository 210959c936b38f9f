"""The transfers of one request: loads from lower tiers, and stores into them."""

from collections.abc import Iterator

from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.values import Tier
from worker_agent.blocks.names import Naming
from worker_agent.connector.slots.errors import SlotOperationError, SlotPoolError
from worker_agent.connector.slots.held_prefix import LowerTier, PinnedPrefix, hold
from worker_agent.connector.slots.protocol import (
    IterationComplete,
    Operation,
    RequestType,
    TransferKind,
)
from worker_agent.connector.slots.slot_blocks import SlotBlocks
from worker_agent.connector.slots.transfer_ledger import TransferLedger


class SlotFacts(Struct, frozen=True):
    """Properties common to all slots of a connector."""

    block_size: int
    """Tokens per block."""
    tiers: tuple[LowerTier, ...]
    """Tiers, fastest first; if there are none, no block is loaded or stored."""
    naming: Naming
    uuids: Iterator[int]
    """Unique numbers for transfers."""
    deadline_s: float
    """Time after which a transfer is not waited for any more."""


class SlotTransfers:
    """The transfers of one slot.

    Invariant: blocks in lower tiers are held exactly from `stage` until their loads are done, or
    they are not needed any more.
    """

    __slots__ = ("_blocks", "_facts", "_held", "_stored_blocks", "ledger", "staged_after_blocks")

    def __init__(self, blocks: SlotBlocks, facts: SlotFacts) -> None:
        self.ledger = TransferLedger()
        self._blocks = blocks
        self._facts = facts
        self._held = PinnedPrefix()
        self.staged_after_blocks = 0
        self._stored_blocks = 0

    @property
    def held_blocks(self) -> int:
        """Number of blocks held in lower tiers."""
        return len(self._held)

    @property
    def right_blocks(self) -> int:
        """Number of leading blocks that the engine has; valid once the loads are done."""
        return self.staged_after_blocks + self.ledger.verified_blocks

    def stage(self, first_block: int) -> bool:
        """Hold the blocks in lower tiers from `first_block` on. Raises SlotPoolError.

        Returns False if there are none. At least one token is left to be computed.
        """
        sequence = self._blocks.sequence
        names = self._blocks.names(len(sequence.blocks))
        try:
            held = hold(self._facts.tiers, names, first_block)
        except KvRouterError as error:
            raise SlotPoolError(error) from error
        if len(held) and (first_block + len(held)) * self._facts.block_size == len(sequence):
            held.drop_last()
        self._held = held
        self.staged_after_blocks = first_block
        return len(held) > 0

    def release(self) -> None:
        """Release the held blocks; calling it again has no effect."""
        self._held.release()

    def load(self) -> None:
        """Load the held blocks, one transfer per tier.

        Raises SlotOperationError if the request has too few device blocks.
        """
        first, blocks = self.staged_after_blocks, len(self._blocks.device_blocks)
        needed = first + len(self._held)
        if blocks < needed:
            key = self._blocks.key
            raise SlotOperationError(key, "device_blocks", f"{blocks}", f"at least {needed}")
        for tier, count in self._held.runs:
            self._add(TransferKind.LOAD, tier, slice(first, first + count), None)
            first += count

    def store(self, full_blocks: int, iteration: int) -> None:
        """Store the first `full_blocks` blocks as far as not stored yet, after the iteration."""
        first = self._stored_blocks
        if full_blocks > first and self._facts.tiers:
            self._stored_blocks = full_blocks
            tier = self._facts.tiers[0].tier
            after = IterationComplete(iteration)
            self._add(TransferKind.STORE, tier, slice(first, full_blocks), after)

    def skip_stored(self, blocks: int) -> None:
        """Treat the first `blocks` blocks as stored: the request did not compute them itself."""
        self._stored_blocks = max(self._stored_blocks, blocks)

    def forget_stored(self, blocks: int) -> None:
        """Treat all blocks behind the first `blocks` as not stored."""
        self._stored_blocks = min(self._stored_blocks, blocks)

    def _add(
        self, kind: TransferKind, tier: Tier, part: slice, after: IterationComplete | None
    ) -> None:
        self.ledger.add(
            Operation(
                next(self._facts.uuids),
                self._blocks.key,
                kind,
                RequestType.IMMEDIATE if after is None else RequestType.SCHEDULED,
                tier,
                tuple(self._blocks.names(part.stop)[part]),
                tuple(self._blocks.device_blocks[part]),
                after,
            )
        )
