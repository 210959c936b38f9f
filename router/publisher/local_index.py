"""What one rank can tell whoever asks it: its last events, or everything it holds."""

from collections.abc import Sequence

from router.protocol.ranges import Events, InvalidRange, RangeAnswer, RangeRequest, TooNew
from router.publisher.journal import EventJournal


class LocalIndex:
    """Answers queries about one rank from its journal, as of this moment.

    An answer's ids are settled by asking: what it says happened up to an id is what a batch or a
    checkpoint will say of it.
    """

    __slots__ = ("_journal",)

    def __init__(self, journal: EventJournal) -> None:
        self._journal = journal

    def answer(self, request: RangeRequest) -> Sequence[RangeAnswer]:
        """The messages that answer: events where all from the start on are still known, otherwise
        a checkpoint, in parts. O(bytes of the answer).
        """
        start, end = request.start_event_id, request.end_event_id
        if start is not None and end is not None and end < start:
            return [InvalidRange(start, end)]
        self._journal.seal()
        recent = self._journal.recent
        if start is None or not recent or start < recent.first_event_id:
            return self._journal.dump()
        if start > recent.last_event_id:
            return [TooNew(self._journal.incarnation, start, end, recent.last_event_id)]
        newest = recent.last_event_id
        return [self._events(start, newest if end is None else min(end, newest))]

    def _events(self, first: int, last: int) -> Events:
        journal = self._journal
        packed = journal.recent.packed(first, last)
        return Events(journal.incarnation, journal.identity, first, last, packed)
