"""A slower tier of this machine: its blocks, their bytes, and recovery from its journal.

in the journal? ─▶ claimed ─▶ bytes ─▶ checksum ─▶ registered; wrong ones are invalidated   by parts

A claimed slot is not allocated until it has been processed.

A slower tier of this machine: its blocks, their bytes and their checksums.

    store: a slot for each new block ─▶ journal entry removed ─▶ bytes ─▶ journal ─▶ registered
    load:  registered? ─▶ bytes ─▶ checksum ─▶ an outcome a block; a wrong one is dropped

Loaded bytes are always verified to be those stored under that name, except where sampling is
allowed. With a thread for reads and writes, checksums are computed meanwhile.
"""

import time
from collections.abc import Generator, Sequence

from torch import Tensor

from worker_agent.blocks.changes import Change
from worker_agent.blocks.handles import MutableBlocks
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import PoolStatus, ResetOutcome
from worker_agent.offload.probe import TierProbe
from worker_agent.storage.errors import StorageError
from worker_agent.storage.journal import Entry, SlotJournal
from worker_agent.transfer.block_tier import TierCounters, measured
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.pipeline import batches_of, inward, outward
from worker_agent.transfer.plan import BlockResult
from worker_agent.transfer.rows import checksum
from worker_agent.transfer.slots import SlotChecksums, Slots


class PersistedBlocks:
    """Recovery into a pool in which block and slot have the same number.

    Calls block; they are for the tier's thread.
    """

    __slots__ = ("_counters", "_io", "_pool", "_proofs", "_slots")

    def __init__(
        self,
        pool: BlockPool,
        slots: Slots,
        proofs: SlotChecksums,
        counters: TierCounters,
        io: IoThreads | None,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._proofs = proofs
        self._counters = counters
        self._io = io

    def run(self, rows: Tensor, until_s: float) -> Generator[None]:
        """Recover `len(rows)` blocks at a time, and yield after each part.

        Ends at `until_s` (`time.monotonic`) at the latest.
        """
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
        # The journal has no entry for blocks that were cleared after their slots were claimed.
        entries = self._proofs.left_behind(slots)
        outcomes = self._proven(entries, list(rows[: len(entries)]))
        results = list(zip(entries, outcomes, strict=True))
        right = [entry for entry, outcome in results if outcome is BlockResult.DONE]
        unread = [entry.slot for entry, outcome in results if outcome is BlockResult.FAILED]
        named = [entry.slot for entry in right]
        kept = self._pool.register(named, [entry.name for entry in right])
        adopted = {slot for slot, each in zip(named, kept, strict=True) if slot == each}
        self._proofs.invalidate(set(slots).difference(adopted, unread))
        self._pool.release([*kept, *set(slots).difference(named)])
        self._counters.adopted += len(adopted)
        self._counters.corrupt += outcomes.count(BlockResult.CORRUPT)
        self._counters.unproven += len(unread)

    def _proven(self, entries: Sequence[Entry], rows: Sequence[Tensor]) -> list[BlockResult]:
        def read(batch: range, _: int) -> list[StorageError | None]:
            slots = [entries[place].slot for place in batch]
            return self._slots.read(slots, rows[batch.start : batch.stop])

        def prove(batch: range, _: int, errors: list[StorageError | None]) -> list[BlockResult]:
            return [
                BlockResult.FAILED
                if error
                else self._proofs.proof(entries[place].slot, rows[place])
                for place, error in zip(batch, errors, strict=True)
            ]

        batches = batches_of(len(entries), self._slots.batch_blocks)
        return inward(self._io, batches, read, prove)


class StoredTier:
    """A tier of the blocks of `pool` in `slots`; block and slot have the same number.

    Calls block and belong to a thread, one at a time.

    Invariant: a registered slot has the checksum of the bytes stored there. So has the journal,
    which never has more than that.
    """

    __slots__ = (
        "_check_every",
        "_io",
        "_proofs",
        "_slots",
        "_unchecked",
        "counters",
        "pool",
    )

    def __init__(
        self,
        pool: BlockPool,
        slots: Slots,
        journal: SlotJournal | None = None,
        *,
        io: IoThreads | None = None,
        check_every: int = 1,
    ) -> None:
        """Create the tier.

        `check_every`: in sampled loads, one of this many blocks is verified; for memory, which
        rarely errs. While a call of `io` is late the tier refuses all calls, and rows that were
        being loaded may still change.
        """
        self.pool = pool
        self.counters = TierCounters()
        self._slots = slots
        self._proofs = SlotChecksums(pool.num_blocks, journal)
        self._io = io
        self._check_every = check_every
        self._unchecked = 0

    @property
    def status(self) -> PoolStatus:
        """Number of blocks by state."""
        return self.pool.status

    @property
    def num_blocks(self) -> int:
        """Capacity in blocks."""
        return self.pool.num_blocks

    @property
    def is_kept(self) -> bool:
        """True if there is a journal."""
        return self._proofs.is_kept

    def store(
        self, names: Sequence[BlockName], rows: Tensor, priority: int = 0
    ) -> list[BlockResult]:
        """Store the leading new blocks as far as they fit. `rows[i]` is the block of `names[i]`.

        Raises TransferError for a repeated name, and for fewer rows than names.
        """
        identities = [name.identity for name in names]
        _check(identities, rows)
        held = self.pool.hold(identities)
        new = [place for place, block in enumerate(held) if block is None]
        fitting = new[: self.pool.available_blocks]
        blocks = self.pool.allocate(len(fitting))
        if blocks is None:  # Other threads allocated blocks in between.
            fitting, blocks = [], []
        outcomes = [BlockResult.FULL if block is None else BlockResult.KNOWN for block in held]
        written, checksums = self._write(blocks, [rows[place] for place in fitting])
        for number, (place, block) in enumerate(zip(fitting, blocks, strict=True)):
            outcomes[place], held[place] = written[number], block
            if written[number] is BlockResult.DONE:
                held[place] = self._name(block, names[place], checksums[number], priority)
        self.pool.release([block for block in held if block is not None])
        self.counters.full += len(new) - len(fitting)
        self.counters.stored += written.count(BlockResult.DONE)
        self.counters.failed += written.count(BlockResult.FAILED)
        return outcomes

    def reserve(
        self, identities: Sequence[bytes], most_blocks: int, kept_blocks: int
    ) -> tuple[list[int], list[int]]:
        """Allocate slots for the leading new blocks, which another component writes.

        Returns their places and the slots: at most `most_blocks`, and none of the last
        `kept_blocks` that could be allocated. They are to be passed to `name`, or released.
        """
        new = [place for place, block in enumerate(self.pool.scan(identities)) if block is None]
        room = max(min(most_blocks, self.pool.available_blocks - kept_blocks), 0)
        blocks = self.pool.allocate(len(new[:room]))
        if blocks is None:  # Other threads allocated blocks in between.
            return [], []
        self._proofs.invalidate(blocks)
        return new[:room], blocks

    def name(
        self, written: MutableBlocks, names: Sequence[BlockName], checksums: Sequence[int]
    ) -> None:
        """Name reserved slots that were written, with their bytes' checksums; the handle ends.

        Where a block of that name is there by now, that one stays.
        """
        slots = written.block_ids
        with written.register(names) as named:
            for slot, kept, name, of_block in zip(
                slots, named.block_ids, names, checksums, strict=True
            ):
                if slot == kept:
                    self._proofs.note(slot, name.identity, of_block)
                    self._proofs.write_down(slot, name)
        self.counters.stored += len(names)

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> list[BlockResult]:
        """Copy blocks into rows. Raises TransferError for fewer rows than identities."""
        _check(identities, rows, may_repeat=True)
        held = self.pool.match_scattered(identities)
        places = [place for place, block in enumerate(held) if block is not None]
        blocks = [block for block in held if block is not None]
        known = [identities[place] for place in places]
        every = self._check_every if is_sampled else 1
        read, bad = self._read(blocks, known, [rows[place] for place in places], every)
        self.pool.release(blocks)
        self._proofs.invalidate(blocks[each] for each in bad)
        self.pool.forget([known[each] for each in bad])
        outcomes = [BlockResult.MISSING] * len(identities)
        for place, outcome in zip(places, read, strict=True):
            outcomes[place] = outcome
        self.counters.loaded += outcomes.count(BlockResult.DONE)
        self.counters.failed += outcomes.count(BlockResult.FAILED)
        self.counters.corrupt += outcomes.count(BlockResult.CORRUPT)
        return outcomes

    def adopt(self, rows: Tensor, until_s: float) -> Generator[None]:
        """Recover the blocks in the journal that are intact, `len(rows)` at a time.

        Other calls may run between the parts. Blocks not verified by `until_s` (`time.monotonic`),
        or not readable now, are left to a later process unless their slots are needed.
        """
        adoption = PersistedBlocks(self.pool, self._slots, self._proofs, self.counters, self._io)
        return adoption.run(rows, until_s)

    def probe(self, rows: Tensor) -> TierProbe | None:
        """Measure the tier on at most half of its empty blocks. `rows`: written and read.

        Returns None if no block is empty, or a read or write fails.
        """
        at_most = (self.pool.status.empty_blocks + 1) // 2  # Other threads may allocate meanwhile.
        blocks = self.pool.allocate(min(len(rows), at_most))
        if not blocks:
            return None
        parts, nobody = list(rows[: len(blocks)]), [b""] * len(blocks)

        def write() -> list[BlockResult]:
            written, checksums = self._write(blocks, parts)
            for block, of_row in zip(blocks, checksums, strict=True):
                self._proofs.note(block, b"", of_row)
            return written

        def read(count: int) -> list[BlockResult]:
            return self._read(blocks[:count], nobody, parts, every=1)[0]

        try:
            return measured(rows[: len(blocks)], write, read)
        finally:
            self.pool.release(blocks)

    def touch(self, identities: Sequence[bytes]) -> None:
        """Mark these blocks as used now."""
        held = self.pool.hold(identities)
        self.pool.release([block for block in held if block is not None])

    def remove(self, identities: Sequence[bytes]) -> ResetOutcome:
        """Remove these blocks, also from the journal, except those in use."""
        known = zip(identities, self.pool.scan(identities), strict=True)
        blocks = {identity: block for identity, block in known if block is not None}
        outcome = self.pool.reset_blocks(identities)
        self._proofs.invalidate(blocks[identity] for identity in outcome.reset_blocks)
        return outcome

    def reset(self) -> None:
        """Remove all blocks. Raises PoolInUseError if a block is in use."""
        self.pool.reset()
        self._proofs.invalidate(range(self.pool.num_blocks))

    def clear(self) -> None:
        """Remove all blocks, also from the journal."""
        self._proofs.invalidate(range(self.pool.num_blocks))
        self.pool.clear()

    def proof(self, block: int, identity: bytes) -> int | None:
        """Return the checksum recorded when this tier stored a block, or None if it did not.

        Any thread that holds the block under this name may call it.
        """
        return self._proofs.of(block, identity)

    def take_changes(self) -> list[Change]:
        """Return the changes of names since the last call, in order."""
        return self.pool.take_changes()

    def close(self) -> None:
        """Release the memory or file and the journal; files stay."""
        if self._io is not None:
            self._io.close()
        self._slots.close()
        self._proofs.close()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _write(
        self, blocks: Sequence[int], rows: Sequence[Tensor]
    ) -> tuple[list[BlockResult], list[int]]:
        """Write rows into slots; return the outcome and the checksum of each."""
        checksums = [0] * len(blocks)
        self._proofs.invalidate(blocks)

        def prove(batch: range, _: int) -> None:
            for each in batch:
                checksums[each] = checksum(rows[each])

        def write(batch: range, _: int) -> list[BlockResult]:
            part = slice(batch.start, batch.stop)
            errors = self._slots.write(blocks[part], rows[part])
            return [BlockResult.FAILED if error else BlockResult.DONE for error in errors]

        batches = batches_of(len(blocks), self._slots.batch_blocks)
        return outward(self._io, batches, prove, write), checksums

    def _read(
        self,
        blocks: Sequence[int],
        identities: Sequence[bytes],
        rows: Sequence[Tensor],
        every: int,
    ) -> tuple[list[BlockResult], list[int]]:
        """Read slots into rows; return the outcome of each and the places of blocks to drop."""
        bad: list[int] = []

        def read(batch: range, _: int) -> list[StorageError | None]:
            part = slice(batch.start, batch.stop)
            return self._slots.read(blocks[part], rows[part])

        def prove(batch: range, _: int, errors: list[StorageError | None]) -> list[BlockResult]:
            results = [
                BlockResult.FAILED
                if error
                else self._proof(blocks[i], identities[i], rows[i], every)
                for i, error in zip(batch, errors, strict=True)
            ]
            bad.extend(
                i for i, each in zip(batch, results, strict=True) if each is not BlockResult.DONE
            )
            return results

        batches = batches_of(len(blocks), self._slots.batch_blocks)
        return inward(self._io, batches, read, prove), bad

    def _proof(self, block: int, identity: bytes, row: Tensor, every: int) -> BlockResult:
        if not self._proofs.is_of(block, identity):
            return BlockResult.CORRUPT
        self._unchecked += 1
        if self._unchecked < every:
            return BlockResult.DONE
        self._unchecked = 0
        return self._proofs.proof(block, row)

    def _name(self, block: int, name: BlockName, of_block: int, priority: int) -> int:
        """Register a block and return its number, or that of the block already registered."""
        [kept] = self.pool.register([block], [name], priority)
        if kept == block:
            self._proofs.note(block, name.identity, of_block)
            self._proofs.write_down(block, name)
        return kept


def _check(identities: Sequence[bytes], rows: Tensor, *, may_repeat: bool = False) -> None:
    if len(rows) < len(identities):
        allowed = f"{len(identities)}, one a block"
        raise TransferError("rows", f"{len(rows)}", allowed, rule="count_mismatch")
    if not may_repeat and len(set(identities)) < len(identities):
        rule = "duplicate_destination_blocks"
        raise TransferError("names", "one twice", "each block once", rule=rule)
