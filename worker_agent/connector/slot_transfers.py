"""What is moved for one request: what lower tiers have of it, and what it gives them."""

from collections.abc import Iterator

from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.values import Tier
from router.slot_errors import SlotOperationError, SlotPoolError
from worker_agent.blocks.names import Naming
from worker_agent.connector.holding import Held, LowerTier, hold
from worker_agent.connector.ledger import TransferLedger
from worker_agent.connector.protocol import (
    IterationComplete,
    Operation,
    RequestType,
    TransferKind,
)
from worker_agent.connector.slot_blocks import SlotBlocks


class SlotFacts(Struct, frozen=True):
    """What all slots of a connector have in common."""

    block_size: int
    """Tokens."""
    tiers: tuple[LowerTier, ...]
    """Fastest first; without any nothing is loaded or stored."""
    naming: Naming
    uuids: Iterator[int]
    """Numbers for transfers, each once."""
    deadline_s: float
    """After so long a transfer is not waited for any more."""


class SlotTransfers:
    """Makes the transfers of one slot.

    Invariant: blocks are held in lower tiers exactly from `stage` until their loads are done, or
    nobody wants them.
    """

    __slots__ = ("_blocks", "_facts", "_held", "_stored_blocks", "ledger", "staged_after_blocks")

    def __init__(self, blocks: SlotBlocks, facts: SlotFacts) -> None:
        self.ledger = TransferLedger()
        self._blocks = blocks
        self._facts = facts
        self._held = Held()
        self.staged_after_blocks = 0
        self._stored_blocks = 0

    @property
    def held_blocks(self) -> int:
        """How many blocks are held in lower tiers."""
        return len(self._held)

    @property
    def right_blocks(self) -> int:
        """How many leading blocks the engine has, now that its loads are done."""
        return self.staged_after_blocks + self.ledger.verified_blocks

    def stage(self, first_block: int) -> bool:
        """Hold what lower tiers have from this block on; False if nothing. Raises SlotPoolError.

        At least one token is left over.
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

    def let_go(self) -> None:
        """Hold nothing any more; again is nothing."""
        self._held.release()

    def load(self) -> None:
        """Load what is held, a transfer a tier. Raises SlotOperationError for too few blocks."""
        first, blocks = self.staged_after_blocks, len(self._blocks.device_blocks)
        needed = first + len(self._held)
        if blocks < needed:
            key = self._blocks.key
            raise SlotOperationError(key, "device_blocks", f"{blocks}", f"at least {needed}")
        for tier, count in self._held.runs:
            self._add(TransferKind.LOAD, tier, slice(first, first + count), None)
            first += count

    def store(self, full_blocks: int, iteration: int) -> None:
        """Store those of the first so many that were not, once the iteration is over."""
        first = self._stored_blocks
        if full_blocks > first and self._facts.tiers:
            self._stored_blocks = full_blocks
            tier = self._facts.tiers[0].tier
            after = IterationComplete(iteration)
            self._add(TransferKind.STORE, tier, slice(first, full_blocks), after)

    def skip_stored(self, blocks: int) -> None:
        """Others computed the first so many, and stored them."""
        self._stored_blocks = max(self._stored_blocks, blocks)

    def forget_stored(self, blocks: int) -> None:
        """All but the first so many are to be stored again."""
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
