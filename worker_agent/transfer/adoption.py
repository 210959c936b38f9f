"""What a former life wrote down, taken over as far as its bytes are still right.

written down? ─▶ claimed ─▶ bytes ─▶ checksum ─▶ named; a wrong one is struck out     part by part

Nobody is given those slots before their turn has come.
"""

import time
from collections.abc import Generator, Sequence

from torch import Tensor

from router.block_errors import StorageError
from worker_agent.blocks.pool import BlockPool
from worker_agent.storage.journal import Entry
from worker_agent.transfer.block_tier import TierCounters
from worker_agent.transfer.hops import batches_of, inward
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.outcome import Outcome
from worker_agent.transfer.proofs import SlotProofs
from worker_agent.transfer.slots import Slots


class Adoption:
    """Into a pool whose blocks are slots by number. Calls block, for the tier's thread."""

    __slots__ = ("_counters", "_io", "_pool", "_proofs", "_slots")

    def __init__(
        self,
        pool: BlockPool,
        slots: Slots,
        proofs: SlotProofs,
        counters: TierCounters,
        io: IoThreads | None,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._proofs = proofs
        self._counters = counters
        self._io = io

    def run(self, rows: Tensor, until_s: float) -> Generator[None]:
        """As many blocks as there are rows at a time, until then (`time.monotonic`)."""
        claimed = self._pool.claim(self._proofs.written())
        try:
            while claimed and time.monotonic() < until_s:
                slots, claimed = claimed[: len(rows)], claimed[len(rows) :]
                self._adopt(slots, rows)
                yield
            self._counters.unproven += len(claimed)
        finally:
            self._pool.release(claimed)

    def _adopt(self, slots: Sequence[int], rows: Tensor) -> None:
        # What was cleared since they were claimed is not written down any more.
        entries = self._proofs.left_behind(slots)
        outcomes = self._proven(entries, list(rows[: len(entries)]))
        told = list(zip(entries, outcomes, strict=True))
        right = [entry for entry, outcome in told if outcome is Outcome.DONE]
        unread = [entry.slot for entry, outcome in told if outcome is Outcome.FAILED]
        named = [entry.slot for entry in right]
        kept = self._pool.register(named, [entry.name for entry in right])
        adopted = {slot for slot, each in zip(named, kept, strict=True) if slot == each}
        self._proofs.strike_out(set(slots).difference(adopted, unread))
        self._pool.release([*kept, *set(slots).difference(named)])
        self._counters.adopted += len(adopted)
        self._counters.corrupt += outcomes.count(Outcome.CORRUPT)
        self._counters.unproven += len(unread)

    def _proven(self, entries: Sequence[Entry], rows: Sequence[Tensor]) -> list[Outcome]:
        def read(batch: range, _: int) -> list[StorageError | None]:
            slots = [entries[place].slot for place in batch]
            return self._slots.read(slots, rows[batch.start : batch.stop])

        def prove(batch: range, _: int, errors: list[StorageError | None]) -> list[Outcome]:
            return [
                Outcome.FAILED if error else self._proofs.proof(entries[place].slot, rows[place])
                for place, error in zip(batch, errors, strict=True)
            ]

        batches = batches_of(len(entries), self._slots.batch_blocks)
        return inward(self._io, batches, read, prove)
