"""In which order a rank's events came: is the next one the next, and of the same life?

Dynamo's publishers number the events of a rank without holes, from 0 (1.0.2) or from 1 (1.6.1), and
anew in each life; 1.6.1 also gives each life's publisher an id of its own. Nobody tells what was
said before we listened.
"""

import enum

from router.dynamo.messages import EventMessage, RouterEvent


class Turn(enum.StrEnum):
    """What an event is to those before it."""

    NEXT = "next"
    FIRST_OF_LIFE = "first_of_life"
    AFTER_GAP = "after_gap"
    LATE_IN_LIFE = "late_in_life"
    JOINED_LATE = "joined_late"
    DUPLICATE = "duplicate"


class EventOrder:
    """Where one rank stands.

    `FIRST_OF_LIFE` and `LATE_IN_LIFE` both begin a life; of the latter, and where we `JOINED_LATE`,
    the beginning is missing.
    """

    __slots__ = ("_last", "_publisher_id", "_sequence")

    def __init__(self) -> None:
        self._last: RouterEvent | None = None
        self._publisher_id: int | None = None
        self._sequence: int | None = None

    def take(self, event: RouterEvent, message: EventMessage) -> Turn:
        """The turn of the next event, which came in this message."""
        turn = self._turn(event, message)
        self._last = event
        self._publisher_id, self._sequence = message.publisher_id, message.sequence
        return turn

    def _turn(self, event: RouterEvent, message: EventMessage) -> Turn:
        last, event_id = self._last, event.event.event_id
        is_first = event_id == message.first_event_id
        if last is None:
            return Turn.FIRST_OF_LIFE if is_first else Turn.JOINED_LATE
        is_same_publisher = message.publisher_id == self._publisher_id
        if is_same_publisher and event == last:
            return Turn.DUPLICATE
        if not is_same_publisher or event_id <= last.event.event_id:
            return Turn.FIRST_OF_LIFE if is_first else Turn.LATE_IN_LIFE
        if event_id > last.event.event_id + 1 or self._lost_envelope(message):
            return Turn.AFTER_GAP
        return Turn.NEXT

    def _lost_envelope(self, message: EventMessage) -> bool:
        """Whether its publisher's envelopes skipped a number since the last event of this rank."""
        if message.sequence is None or self._sequence is None:
            return False
        return message.sequence > self._sequence + 1
