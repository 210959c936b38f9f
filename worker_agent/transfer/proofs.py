"""What proves the bytes of slots: whose they are, their checksum, a journal of both."""

from collections.abc import Iterable

from torch import Tensor

from worker_agent.blocks.names import BlockName
from worker_agent.storage.journal import Entry, SlotJournal
from worker_agent.transfer.checksums import checksum
from worker_agent.transfer.outcome import Outcome


class SlotProofs:
    """Of so many slots. `journal`: where they outlive the process; it never has more than this."""

    __slots__ = ("_checksums", "_identities", "_journal")

    def __init__(self, num_slots: int, journal: SlotJournal | None) -> None:
        self._checksums = [0] * num_slots
        self._identities = [b""] * num_slots
        self._journal = journal

    def strike_out(self, slots: Iterable[int]) -> None:
        """Their bytes are about to change, or prove nothing any more."""
        if self._journal is not None:
            for slot in slots:
                self._journal.begin(slot)

    def note(self, slot: int, identity: bytes, of_bytes: int) -> None:
        """Whose bytes are there now, and their checksum; in an order that `of` can rely on."""
        self._checksums[slot] = of_bytes
        self._identities[slot] = identity

    def write_down(self, slot: int, name: BlockName) -> None:
        """A later life is to find what was noted."""
        if self._journal is not None:
            self._journal.commit(slot, name, self._checksums[slot])

    def is_of(self, slot: int, identity: bytes) -> bool:
        """Whether this tier stored that block there: bytes that somebody else put there, it cannot
        prove.
        """
        return self._identities[slot] == identity

    def of(self, slot: int, identity: bytes) -> int | None:
        """The checksum of a block that this tier stored there; None where it did not. Any thread,
        as long as the block is held under this name.
        """
        return self._checksums[slot] if self._identities[slot] == identity else None

    def proof(self, slot: int, row: Tensor) -> Outcome:
        """Whether these are the bytes that were stored: DONE, or CORRUPT."""
        return Outcome.DONE if checksum(row) == self._checksums[slot] else Outcome.CORRUPT

    @property
    def is_kept(self) -> bool:
        """Whether a later life finds what is written down."""
        return self._journal is not None

    def written(self) -> list[int]:
        """Slots that a former life wrote something down of."""
        return [] if self._journal is None else self._journal.written()

    def left_behind(self, slots: Iterable[int]) -> list[Entry]:
        """What it wrote down of these, noted here; whether it is still so, `proof` says."""
        entries = [] if self._journal is None else self._journal.entries(slots)
        for entry in entries:
            self.note(entry.slot, entry.name.identity, entry.checksum)
        return entries

    def close(self) -> None:
        """Let the journal go; it stays."""
        if self._journal is not None:
            self._journal.close()
