"""The order of one rank's messages, and the verdict on the next one.

A rank is in one of three states. `blind`: nothing of its present incarnation was read. `current`:
everything up to `cursor` was read. `broken`: an event after `cursor` was missed, or the index
differs from the rank's sums; only a checkpoint heals it.

    blind ──checkpoint──▶ current ──gap, wrong digest, stream lost──▶ broken ──checkpoint──▶ current

The log has one writer per rank and is read in order, so a message of another incarnation is always
of a later one. An incarnation starts with a checkpoint; any other first message is a gap.
"""

import enum
from collections.abc import Iterator

from router.protocol.events import Checkpoint, EventBatch, LogMessage
from router.protocol.values import TIERS, HashArray, unpack_hashes


class LogVerdict(enum.StrEnum):
    """Result of classifying a message."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    GAP = "gap"
    NEW_LIFE = "new_life"
    PARTIAL = "partial"
    FOREIGN = "foreign"


# A lookup of an enum member costs 35 ns, so hot paths use names bound once.
_APPLY, _GAP, _DUPLICATE = LogVerdict.APPLY, LogVerdict.GAP, LogVerdict.DUPLICATE


class EventLog:
    """Cursor and state of one rank.

    `broken_reason` is None while current. `doubt_since_s` is the time of the first evidence against
    the index, broken or merely behind; None while there is none.
    """

    __slots__ = (
        "_is_restored",
        "_parts",
        "broken_reason",
        "cursor",
        "doubt_since_s",
        "incarnation",
    )

    def __init__(self, now_s: float) -> None:
        self.incarnation: int | None = None
        self.cursor = 0
        self.broken_reason: str | None = "no checkpoint read yet"
        self.doubt_since_s: float | None = now_s
        self._is_restored = False
        self._parts: list[Checkpoint] = []

    @property
    def is_blind(self) -> bool:
        """True if nothing of the rank's present incarnation is known."""
        return self.incarnation is None and not self._is_restored

    @property
    def is_collecting(self) -> bool:
        """True if some parts of a checkpoint have been received and others have not."""
        return bool(self._parts)

    def classify(self, message: LogMessage) -> LogVerdict:
        """Return the verdict on the next message; collects the parts of a checkpoint.

        A batch that begins before the cursor and ends behind it is applied whole: events are
        absolute, so that the result as of its end is the same.
        """
        if not isinstance(message, EventBatch):
            return self._classify_checkpoint(message)
        if message.incarnation != self.incarnation:
            return _GAP
        if message.last_event_id <= self.cursor:
            return _DUPLICATE
        if self.broken_reason is not None or message.first_event_id > self.cursor + 1:
            return _GAP
        return _APPLY

    def _classify_checkpoint(self, message: Checkpoint) -> LogVerdict:
        if not self._collect(message):
            return LogVerdict.PARTIAL
        if message.incarnation != self.incarnation:
            return LogVerdict.NEW_LIFE
        if self.broken_reason is None and message.event_id <= self.cursor:
            self._parts = []
            return LogVerdict.DUPLICATE
        return LogVerdict.APPLY

    def collected_blocks(self) -> Iterator[tuple[int, HashArray]]:
        """Yield all blocks of the checkpoint that was completed by the last classified message.

        Each time with their tier, or the number of tiers plus their class.
        """
        for part in self._parts:
            for held in part.blocks:
                yield held.tier, unpack_hashes(held.sequence_hashes)
            for of_class in part.class_blocks if part.hybrid is not None else ():
                yield TIERS + of_class.class_index, unpack_hashes(of_class.sequence_hashes)

    def resume(self, incarnation: int, event_id: int) -> None:
        """Set the index as current as of this event of this incarnation."""
        self.cursor = event_id
        self.incarnation = incarnation
        self.broken_reason = None
        self.doubt_since_s = None
        if self._parts:
            self._parts = []

    def restored(self, event_id: int, now_s: float) -> None:
        """Set a blind rank's contents as restored from another process's dump; it stays broken."""
        self.cursor = event_id
        self._is_restored = True
        self.broken_reason = "restored from a dump"
        self.doubt(now_s)

    def break_off(self, reason: str, now_s: float) -> None:
        """Mark the index of this rank as wrong."""
        self.broken_reason = reason
        self.doubt(now_s)

    def doubt(self, now_s: float) -> None:
        """Record evidence against the index; keeps the time of the first."""
        if self.doubt_since_s is None:
            self.doubt_since_s = now_s

    def _collect(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.part == 0:
            self._parts = []
        first = self._parts[0] if self._parts else checkpoint
        same = (first.incarnation, first.event_id) == (checkpoint.incarnation, checkpoint.event_id)
        if not same or checkpoint.part != len(self._parts):
            self._parts = []
            return False
        self._parts.append(checkpoint)
        return checkpoint.part == checkpoint.parts - 1
