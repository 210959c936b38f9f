"""A slower tier: which blocks it keeps, their bytes, and what proves that these are still right.

    store: a slot for each new block ─▶ struck out ─▶ bytes ─▶ written down with checksum ─▶ named
    load:  named? ─▶ bytes ─▶ checksum ─▶ the leading blocks that are right; a wrong one is dropped

Nobody is ever given a byte that was not proven to be what was stored under that name.
"""

from collections.abc import Sequence

from msgspec import Struct
from torch import Tensor
from xxhash import xxh3_64_intdigest

from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.storage.journal import SlotJournal
from worker_agent.transfer.slots import Slots


class TierCounters(Struct):
    """What went through a tier since it was made, in blocks."""

    stored: int = 0
    loaded: int = 0
    full: int = 0
    """Not stored, for every slot was in use."""
    failed: int = 0
    """Neither stored nor loaded, for the storage said so."""
    corrupt: int = 0
    """Given up, for their bytes were not those that were stored."""
    adopted: int = 0


class StoredTier:
    """Blocks of `pool` in `slots`; block and slot are one number. Calls block: for a thread, one at
    a time.

    Invariant: a named slot has the checksum of what was stored there; so has the journal, which
    never has more than that.
    """

    __slots__ = ("_checksums", "_journal", "_slots", "counters", "pool")

    def __init__(self, pool: BlockPool, slots: Slots, journal: SlotJournal | None = None) -> None:
        self.pool = pool
        self._slots = slots
        self._journal = journal
        self._checksums = [0] * pool.num_blocks
        self.counters = TierCounters()

    def store(self, names: Sequence[BlockName], rows: Tensor, priority: int = 0) -> list[bool]:
        """Keep blocks; which of them are kept now. `rows[i]` holds the block of `names[i]`.

        As many of the leading ones as fit: behind a gap nothing is of use.
        """
        new = [i for i, name in enumerate(names) if not self.pool.matching([name.identity])]
        fitting = new[: self.pool.available_blocks]
        self.counters.full += len(new) - len(fitting)
        blocks = self.pool.allocate(len(fitting)) or []
        kept = self._written(blocks, [names[i] for i in fitting], rows[fitting], priority)
        self.pool.release(blocks)
        self.counters.stored += sum(kept)
        is_kept = dict(zip(fitting, kept, strict=True))
        return [is_kept.get(i, i not in new) for i in range(len(names))]

    def load(self, identities: Sequence[bytes], rows: Tensor) -> int:
        """Copy the leading blocks of a prompt into rows: how many are there, and right."""
        blocks = self.pool.match(identities)
        errors = self._slots.read(blocks, rows)
        loaded = 0
        for place, (block, error) in enumerate(zip(blocks, errors, strict=True)):
            if error is not None:
                self.counters.failed += 1
                break
            if _checksum(rows[place]) != self._checksums[block]:
                self.counters.corrupt += 1
                break
            loaded += 1
        self.pool.release(blocks)
        if loaded < len(blocks):
            self.pool.reset_blocks([identities[loaded]])
        self.counters.loaded += loaded
        return loaded

    def adopt(self, rows: Tensor) -> int:
        """Take over what a former life wrote down, as far as its bytes are still right; how many
        blocks that are. `rows`: room for one block at least.
        """
        assert self._journal is not None
        adopted = 0
        for entry in self._journal.entries():
            [error] = self._slots.read([entry.slot], rows)
            is_right = error is None and _checksum(rows[0]) == entry.checksum
            if is_right and self.pool.adopt(entry.slot, entry.name):
                self._checksums[entry.slot] = entry.checksum
                adopted += 1
            else:
                self.counters.corrupt += not is_right
                self._journal.begin(entry.slot)
        self.counters.adopted += adopted
        return adopted

    def _written(
        self, blocks: Sequence[int], names: Sequence[BlockName], rows: Tensor, priority: int
    ) -> list[bool]:
        if self._journal is not None:
            for block in blocks:
                self._journal.begin(block)
        errors = self._slots.write(blocks, rows)
        for block, name, row, error in zip(blocks, names, rows, errors, strict=True):
            if error is not None:
                self.counters.failed += 1
                continue
            self._checksums[block] = _checksum(row)
            if self._journal is not None:
                self._journal.commit(block, name, self._checksums[block])
            self.pool.register([block], [name], priority)
        return [error is None for error in errors]


def _checksum(row: Tensor) -> int:
    return xxh3_64_intdigest(row.numpy().data)
