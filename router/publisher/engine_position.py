"""How far an engine's life has been applied, and what that life looked like.

Engines number their batches from 0 in every life and say nothing else about which life it is. So
the fingerprints of the last batches are kept: a life is the known one if it has the same content at
the same numbers. Batches carry the time at which they were published, so two lives differ in every
payload. Where payloads carry no time, lives that are equal in all compared batches are taken for
one; if they are equal from the beginning that is even right, because so are their caches.
"""

from array import array

from msgspec import Struct

from router.publisher.engine_steps import (
    Apply,
    Batch,
    EngineLogCounters,
    Lost,
    NewLife,
    Replay,
    Step,
)


class SavedPosition(Struct, frozen=True):
    """A position to go on from. `fingerprints`: u64 each, of the batches before `cursor`."""

    cursor: int
    fingerprints: bytes


class EnginePosition:
    """The next sequence of one life, fingerprints of what came before it, and the steps so far.

    `is_fresh`: nothing was applied, restored or lost since the life began. `is_whole`: nothing was
    lost.
    """

    __slots__ = (
        "_counters",
        "_fingerprints",
        "_known_from",
        "_steps",
        "cursor",
        "is_fresh",
        "is_whole",
    )

    def __init__(
        self, fingerprints: int, counters: EngineLogCounters, saved: SavedPosition | None
    ) -> None:
        self._fingerprints = array("Q", bytes(8 * fingerprints))
        self._counters = counters
        self._steps: list[Step] = []
        self._known_from = 0
        self.cursor = 0
        self.is_fresh = saved is None
        self.is_whole = True
        if saved is not None:
            self._restore(saved)

    @property
    def known_from(self) -> int:
        """Sequence of the oldest batch whose fingerprint is kept; the cursor if there is none."""
        return max(self._known_from, self.cursor - len(self._fingerprints))

    def has(self, batch: Batch) -> bool:
        """Was exactly this batch applied, and lately enough to know it?"""
        sequence = batch.sequence
        if not self.known_from <= sequence < self.cursor:
            return False
        return self._fingerprints[sequence % len(self._fingerprints)] == batch.fingerprint

    def apply(self, batch: Batch) -> None:
        """The batch at the cursor is the next one of this life."""
        self._fingerprints[self.cursor % len(self._fingerprints)] = batch.fingerprint
        self.cursor += 1
        self.is_fresh = False
        self._steps.append(Apply(batch.sequence, batch.payload))

    def ask(self, first: int) -> None:
        """A replay is needed."""
        self._counters.replays += 1
        self._steps.append(Replay(first))

    def new_life(self, reason: str) -> None:
        """Another life begins, at 0."""
        self._counters.new_lives += 1
        self._start_at(0)
        self.is_fresh = self.is_whole = True
        self._steps.append(NewLife(reason))

    def lose(self, last: int | None, reason: str) -> None:
        """Everything from the cursor up to `last` is lost; None: nobody knows up to where."""
        self._counters.lost_gaps += 1
        self.is_fresh = self.is_whole = False
        self._steps.append(Lost(self.cursor, last, reason))
        if last is not None:
            self._start_at(last + 1)

    def resume_at(self, sequence: int) -> None:
        """The life goes on at this sequence, after a loss of unknown size."""
        self._start_at(sequence)

    def take_steps(self) -> list[Step]:
        """The steps since the last call, in order."""
        steps, self._steps = self._steps, []
        return steps

    def save(self) -> SavedPosition:
        """The position as of the last step."""
        ring, size = self._fingerprints, len(self._fingerprints)
        known = array("Q", (ring[s % size] for s in range(self.known_from, self.cursor)))
        return SavedPosition(self.cursor, known.tobytes())

    def _restore(self, saved: SavedPosition) -> None:
        known = array("Q", saved.fingerprints)[-len(self._fingerprints) :]
        self._start_at(saved.cursor)
        self._known_from = saved.cursor - len(known)
        for sequence, fingerprint in enumerate(known, self._known_from):
            self._fingerprints[sequence % len(self._fingerprints)] = fingerprint

    def _start_at(self, sequence: int) -> None:
        self.cursor = self._known_from = sequence
