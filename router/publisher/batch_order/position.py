"""The cursor in an engine's life, and live batches that cannot be applied yet.

Engines number their batches from 0 in every life and do not publish which life it is. So the
fingerprints of the last batches are kept: a life is the known one if it has the same content at the
same numbers. Batches contain the time at which they were published, so two lives differ in every
payload. If payloads contain no time, lives that are equal in all compared batches are taken for
one; if they are equal from the beginning this is correct, because so are their caches.
"""

from array import array

from msgspec import Struct

from router.publisher.batch_order.steps import (
    Apply,
    Batch,
    BatchOrderCounters,
    Lost,
    NewLife,
    Replay,
    Step,
)


class SavedPosition(Struct, frozen=True):
    """A saved position. `fingerprints`: a u64 for each of the batches before `cursor`."""

    cursor: int
    fingerprints: bytes


class Cursor:
    """The next sequence number of one life, fingerprints of earlier batches, and the steps so far.

    `is_fresh`: nothing was applied, restored or lost since the life began. `is_whole`: nothing was
    lost.
    """

    __slots__ = (
        "_counters",
        "_fingerprints",
        "_first_known",
        "_steps",
        "cursor",
        "is_fresh",
        "is_whole",
    )

    def __init__(
        self, fingerprints: int, counters: BatchOrderCounters, saved: SavedPosition | None
    ) -> None:
        self._fingerprints = array("Q", bytes(8 * fingerprints))
        self._counters = counters
        self._steps: list[Step] = []
        self._first_known = 0
        self.cursor = 0
        self.is_fresh = saved is None
        self.is_whole = True
        if saved is not None:
            self._restore(saved)

    @property
    def first_known(self) -> int:
        """The number of the oldest batch with a known fingerprint; the cursor if there is none."""
        return max(self._first_known, self.cursor - len(self._fingerprints))

    def has(self, batch: Batch) -> bool:
        """Return whether exactly this batch was applied; False if its fingerprint is dropped."""
        sequence = batch.sequence
        if not self.first_known <= sequence < self.cursor:
            return False
        return self._fingerprints[sequence % len(self._fingerprints)] == batch.fingerprint

    def apply(self, batch: Batch) -> None:
        """Apply the batch at the cursor."""
        self._fingerprints[self.cursor % len(self._fingerprints)] = batch.fingerprint
        self.cursor += 1
        self.is_fresh = False
        self._steps.append(Apply(batch.sequence, batch.payload))

    def request_replay(self, first: int) -> None:
        """Request a replay of all batches from `first` on."""
        self._counters.replays += 1
        self._steps.append(Replay(first))

    def new_life(self, reason: str) -> None:
        """Start another life, at batch 0."""
        self._counters.new_lives += 1
        self._start_at(0)
        self.is_fresh = self.is_whole = True
        self._steps.append(NewLife(reason))

    def lose(self, last: int | None, reason: str) -> None:
        """Record the loss of all batches from the cursor to `last`; None if the end is unknown."""
        self._counters.lost_gaps += 1
        self.is_fresh = self.is_whole = False
        self._steps.append(Lost(self.cursor, last, reason))
        if last is not None:
            self._start_at(last + 1)

    def resume_at(self, sequence: int) -> None:
        """Continue the life at this sequence number, after a loss of unknown size."""
        self._start_at(sequence)

    def take_steps(self) -> list[Step]:
        """Return the steps since the last call, in order."""
        steps, self._steps = self._steps, []
        return steps

    def save(self) -> SavedPosition:
        """Return the position after the last step."""
        ring, size = self._fingerprints, len(self._fingerprints)
        known = array("Q", (ring[s % size] for s in range(self.first_known, self.cursor)))
        return SavedPosition(self.cursor, known.tobytes())

    def _restore(self, saved: SavedPosition) -> None:
        known = array("Q", saved.fingerprints)[-len(self._fingerprints) :]
        self._start_at(saved.cursor)
        self._first_known = saved.cursor - len(known)
        for sequence, fingerprint in enumerate(known, self._first_known):
            self._fingerprints[sequence % len(self._fingerprints)] = fingerprint

    def _start_at(self, sequence: int) -> None:
        self.cursor = self._first_known = sequence


class BufferedBatch(Struct, frozen=True, gc=False):
    """A batch, and the number of replays that had been requested when it arrived."""

    batch: Batch
    replays_asked: int


class BatchBuffer:
    """A bounded queue that rejects batches beyond its limits, and records that it did."""

    __slots__ = ("_batches", "_bytes", "_max_batches", "_max_bytes", "overflowed")

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: list[BufferedBatch] = []
        self._bytes = 0
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, held: BufferedBatch) -> bool:
        """Add a batch. Returns False if it was dropped."""
        size_bytes = self._bytes + len(held.batch.payload)
        if len(self._batches) >= self._max_batches or size_bytes > self._max_bytes:
            self.overflowed = True
            return False
        self._batches.append(held)
        self._bytes = size_bytes
        return True

    def by_sequence(self) -> dict[int, Batch]:
        """Return the last batch received of each sequence number."""
        return {held.batch.sequence: held.batch for held in self._batches}

    def take(self) -> list[BufferedBatch]:
        """Return and remove all batches, in order of arrival; the queue has room again."""
        batches, self._batches = self._batches, []
        self._bytes = 0
        self.overflowed = False
        return batches
