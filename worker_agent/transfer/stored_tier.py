"""A slower tier of this machine: which blocks it keeps, their bytes, and what proves these right.

    store: a slot for each new block ─▶ struck out ─▶ bytes ─▶ written down with checksum ─▶ named
    load:  named? ─▶ bytes ─▶ checksum ─▶ told block by block; a wrong one is dropped

Nobody is ever given a byte that was not proven to be what was stored under that name. With a thread
for its reads and writes, checksums are made meanwhile.
"""

from collections.abc import Generator, Sequence

from torch import Tensor

from router.block_errors import StorageError, TransferError
from worker_agent.blocks.changes import Change
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import PoolStatus, ResetOutcome
from worker_agent.offload.probe import TierProbe
from worker_agent.storage.journal import SlotJournal
from worker_agent.transfer.adoption import Adoption
from worker_agent.transfer.block_tier import TierCounters
from worker_agent.transfer.checksums import checksum
from worker_agent.transfer.hops import batches_of, inward, outward
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.measuring import measured
from worker_agent.transfer.outcome import Outcome
from worker_agent.transfer.proofs import SlotProofs
from worker_agent.transfer.slots import Slots


class StoredTier:
    """Blocks of `pool` in `slots`; block and slot are one number. Calls block: for a thread, one at
    a time.

    Invariant: a named slot has the checksum of what was stored there; so has the journal, which
    never has more than that.
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
        """`check_every`: of so many blocks loaded sampled one is checked; for memory, which seldom
        errs.

        While a call of `io` is late the tier refuses everything, and rows that were being loaded
        may still change.
        """
        self.pool = pool
        self.counters = TierCounters()
        self._slots = slots
        self._proofs = SlotProofs(pool.num_blocks, journal)
        self._io = io
        self._check_every = check_every
        self._unchecked = 0

    @property
    def status(self) -> PoolStatus:
        """All blocks, by what becomes of them."""
        return self.pool.status

    @property
    def num_blocks(self) -> int:
        """Room, in blocks."""
        return self.pool.num_blocks

    @property
    def is_kept(self) -> bool:
        """With a journal."""
        return self._proofs.is_kept

    def store(self, names: Sequence[BlockName], rows: Tensor, priority: int = 0) -> list[Outcome]:
        """Keep blocks. `rows[i]` holds the block of `names[i]`; as many of the leading new ones as
        fit. Raises TransferError for a name that is there twice, and fewer rows than names.
        """
        identities = [name.identity for name in names]
        _check(identities, rows)
        held = self.pool.hold(identities)
        new = [place for place, block in enumerate(held) if block is None]
        fitting = new[: self.pool.available_blocks]
        blocks = self.pool.allocate(len(fitting))
        if blocks is None:  # others took them in between
            fitting, blocks = [], []
        outcomes = [Outcome.FULL if block is None else Outcome.KNOWN for block in held]
        written, checksums = self._write(blocks, [rows[place] for place in fitting])
        for number, (place, block) in enumerate(zip(fitting, blocks, strict=True)):
            outcomes[place], held[place] = written[number], block
            if written[number] is Outcome.DONE:
                held[place] = self._name(block, names[place], checksums[number], priority)
        self.pool.release([block for block in held if block is not None])
        self.counters.full += len(new) - len(fitting)
        self.counters.stored += written.count(Outcome.DONE)
        self.counters.failed += written.count(Outcome.FAILED)
        return outcomes

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> list[Outcome]:
        """Copy blocks into rows. Raises TransferError for fewer rows than identities."""
        _check(identities, rows, may_repeat=True)
        held = self.pool.match_scattered(identities)
        places = [place for place, block in enumerate(held) if block is not None]
        blocks = [block for block in held if block is not None]
        known = [identities[place] for place in places]
        every = self._check_every if is_sampled else 1
        read, bad = self._read(blocks, known, [rows[place] for place in places], every)
        self.pool.release(blocks)
        self._proofs.strike_out(blocks[each] for each in bad)
        self.pool.forget([known[each] for each in bad])
        outcomes = [Outcome.MISSING] * len(identities)
        for place, outcome in zip(places, read, strict=True):
            outcomes[place] = outcome
        self.counters.loaded += outcomes.count(Outcome.DONE)
        self.counters.failed += outcomes.count(Outcome.FAILED)
        self.counters.corrupt += outcomes.count(Outcome.CORRUPT)
        return outcomes

    def adopt(self, rows: Tensor, until_s: float) -> Generator[None]:
        """Take over what a former life wrote down, as far as its bytes are still right: as many
        blocks as there are rows at a time, between which others may have their turn.

        What is not proven by then (`time.monotonic`), or cannot be read now, is left to a later
        life, as long as its slot is not needed.
        """
        adoption = Adoption(self.pool, self._slots, self._proofs, self.counters, self._io)
        return adoption.run(rows, until_s)

    def probe(self, rows: Tensor) -> TierProbe | None:
        """How fast it is, on at most half of the blocks that are empty; None if there are none, or
        it fails. `rows` are written and read.
        """
        at_most = (self.pool.status.empty_blocks + 1) // 2  # others may allocate meanwhile
        blocks = self.pool.allocate(min(len(rows), at_most))
        if not blocks:
            return None
        parts, nobody = list(rows[: len(blocks)]), [b""] * len(blocks)

        def write() -> list[Outcome]:
            written, checksums = self._write(blocks, parts)
            for block, of_row in zip(blocks, checksums, strict=True):
                self._proofs.note(block, b"", of_row)
            return written

        def read(count: int) -> list[Outcome]:
            return self._read(blocks[:count], nobody, parts, every=1)[0]

        try:
            return measured(rows[: len(blocks)], write, read)
        finally:
            self.pool.release(blocks)

    def touch(self, identities: Sequence[bytes]) -> None:
        """Treat these as if they were used now."""
        held = self.pool.hold(identities)
        self.pool.release([block for block in held if block is not None])

    def remove(self, identities: Sequence[bytes]) -> ResetOutcome:
        """Give these up, as far as nobody uses them; also for a later life."""
        known = zip(identities, self.pool.scan(identities), strict=True)
        blocks = {identity: block for identity, block in known if block is not None}
        outcome = self.pool.reset_blocks(identities)
        self._proofs.strike_out(blocks[identity] for identity in outcome.reset_blocks)
        return outcome

    def reset(self) -> None:
        """Give everything up. Raises PoolInUseError while somebody uses a block."""
        self.pool.reset()
        self._proofs.strike_out(range(self.pool.num_blocks))

    def clear(self) -> None:
        """Give everything up, also for a later life."""
        self._proofs.strike_out(range(self.pool.num_blocks))
        self.pool.clear()

    def proof(self, block: int, identity: bytes) -> int | None:
        """What was noted of a block when it was stored; None: nothing, or not by this tier. From
        any thread that holds the block under this name.
        """
        return self._proofs.of(block, identity)

    def take_changes(self) -> list[Change]:
        """What happened to names since the last call, in order."""
        return self.pool.take_changes()

    def close(self) -> None:
        """Let go of the memory or file, which stays, and of the journal."""
        if self._io is not None:
            self._io.close()
        self._slots.close()
        self._proofs.close()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _write(
        self, blocks: Sequence[int], rows: Sequence[Tensor]
    ) -> tuple[list[Outcome], list[int]]:
        """Rows into slots: what became of each, and its checksum."""
        checksums = [0] * len(blocks)
        self._proofs.strike_out(blocks)

        def prove(batch: range, _: int) -> None:
            for each in batch:
                checksums[each] = checksum(rows[each])

        def write(batch: range, _: int) -> list[Outcome]:
            part = slice(batch.start, batch.stop)
            errors = self._slots.write(blocks[part], rows[part])
            return [Outcome.FAILED if error else Outcome.DONE for error in errors]

        batches = batches_of(len(blocks), self._slots.batch_blocks)
        return outward(self._io, batches, prove, write), checksums

    def _read(
        self,
        blocks: Sequence[int],
        identities: Sequence[bytes],
        rows: Sequence[Tensor],
        every: int,
    ) -> tuple[list[Outcome], list[int]]:
        """Slots into rows: what became of each, and the places of those to be dropped."""
        bad: list[int] = []

        def read(batch: range, _: int) -> list[StorageError | None]:
            part = slice(batch.start, batch.stop)
            return self._slots.read(blocks[part], rows[part])

        def prove(batch: range, _: int, errors: list[StorageError | None]) -> list[Outcome]:
            told = [
                Outcome.FAILED if error else self._proof(blocks[i], identities[i], rows[i], every)
                for i, error in zip(batch, errors, strict=True)
            ]
            bad.extend(i for i, each in zip(batch, told, strict=True) if each is not Outcome.DONE)
            return told

        batches = batches_of(len(blocks), self._slots.batch_blocks)
        return inward(self._io, batches, read, prove), bad

    def _proof(self, block: int, identity: bytes, row: Tensor, every: int) -> Outcome:
        if not self._proofs.is_of(block, identity):
            return Outcome.CORRUPT
        self._unchecked += 1
        if self._unchecked < every:
            return Outcome.DONE
        self._unchecked = 0
        return self._proofs.proof(block, row)

    def _name(self, block: int, name: BlockName, of_block: int, priority: int) -> int:
        """The block that holds this from now on: another, if that came first."""
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
