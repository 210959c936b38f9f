"""The order of one rank's messages: what to do with the next one.

A rank is in one of three states. `blind`: nothing of its present life was read. `current`:
everything up to `cursor` was. `broken`: something after `cursor` was missed, or what was applied
does not add up; only a checkpoint heals it.

    blind ──checkpoint──▶ current ──gap, wrong digest, stream lost──▶ broken ──checkpoint──▶ current

The log is written by one writer per rank and read in order, so a message of another incarnation is
always of a later one; it starts with a checkpoint, and anything else from it is a gap.
"""

import enum

from router.protocol.events import Checkpoint, EventBatch, LogMessage, TierBlocks


class Verdict(enum.StrEnum):
    """What became of a message."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    GAP = "gap"
    NEW_LIFE = "new_life"
    PARTIAL = "partial"
    FOREIGN = "foreign"


# A member is looked up anew with every mention of it, 35 ns each: hot paths have names for some.
_APPLY, _GAP, _DUPLICATE = Verdict.APPLY, Verdict.GAP, Verdict.DUPLICATE


class EventLog:
    """Cursor and condition of one rank.

    `broken_reason` is None while current. `doubt_since_s` is when something first spoke against the
    index, be it broken or merely behind; None while nothing does.
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
        """Nothing of the rank's present life is known."""
        return self.incarnation is None and not self._is_restored

    @property
    def is_collecting(self) -> bool:
        """Some parts of a checkpoint have come, and others have not."""
        return bool(self._parts)

    def classify(self, message: LogMessage) -> Verdict:
        """What to do with the next message; collects the parts of a checkpoint.

        A batch that begins before the cursor and ends behind it is applied whole: events are
        absolute, and as of its end nothing differs.
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

    def _classify_checkpoint(self, message: Checkpoint) -> Verdict:
        if not self._collect(message):
            return Verdict.PARTIAL
        if message.incarnation != self.incarnation:
            return Verdict.NEW_LIFE
        if self.broken_reason is None and message.event_id <= self.cursor:
            self._parts = []
            return Verdict.DUPLICATE
        return Verdict.APPLY

    def collected_blocks(self) -> list[TierBlocks]:
        """All blocks of the checkpoint whose last part was just classified."""
        return [blocks for part in self._parts for blocks in part.blocks]

    def resume(self, incarnation: int, event_id: int) -> None:
        """Note that the index now stands as of this event of this life."""
        self.cursor = event_id
        self.incarnation = incarnation
        self.broken_reason = None
        self.doubt_since_s = None
        if self._parts:
            self._parts = []

    def restored(self, event_id: int, now_s: float) -> None:
        """Note that a blind rank shows what somebody else knew of it."""
        self.cursor = event_id
        self._is_restored = True
        self.broken_reason = "restored from a dump"
        self.doubt(now_s)

    def break_off(self, reason: str, now_s: float) -> None:
        """Note that what the index holds of this rank is no longer right."""
        self.broken_reason = reason
        self.doubt(now_s)

    def doubt(self, now_s: float) -> None:
        """Note that something speaks against the index; the first time counts."""
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
