"""The state of one stream whose events pass byte for byte."""

from collections.abc import Callable

from router.forward.apis.sse import named_data_of
from router.forward.apis.stream_events import StreamEvent
from router.protocol.requests import Usage
from router.protocol.values import UNREADABLE


class EngineErrorEvent(Exception):
    """The engine reports in its stream that it cannot continue; `event` contains the reason."""

    def __init__(self, event: bytes) -> None:
        super().__init__(event[:200].decode(errors="replace"))
        self.event = event


class EventStream:
    """The state of a stream from one engine; it cannot go on at another one.

    `usage`: as last reported. `is_done`: the last event was received. `answer_id`: the id under
    which the engine may keep the answer.
    """

    __slots__ = (
        "_counted_tokens",
        "_event_of",
        "_is_delta_due",
        "answer_id",
        "has_first_token",
        "is_done",
        "usage",
    )

    token_ids: tuple[int, ...] = ()
    has_all_tokens = False

    def __init__(self, event_of: Callable[[bytes], StreamEvent]) -> None:
        self._event_of = event_of
        self._counted_tokens = 0
        self.has_first_token = self.is_done = self._is_delta_due = False
        self.usage: Usage | None = None
        self.answer_id: str | None = None

    @property
    def is_finished(self) -> bool:
        """True if the response has ended."""
        return self.is_done

    def take(self, event: bytes) -> tuple[bytes, int]:
        """Return the event, and the number of new tokens that it shows.

        The event of the first token counts as that token, and the first delta as the same one. The
        last event corrects the count. Raises EngineErrorEvent.
        """
        data = named_data_of(event)
        if data is None:
            return event, 0
        try:
            read = self._event_of(data)
        except UNREADABLE:
            return event, 0
        if read.stage == "error":
            raise EngineErrorEvent(event)
        self.usage = read.usage or self.usage
        self.answer_id = read.answer_id or self.answer_id
        self.is_done |= read.stage == "end"
        return event, self._count(read)

    def _count(self, read: StreamEvent) -> int:
        """Return the number of tokens that this event adds."""
        if read.stage == "before":
            return 0
        is_delta, before = read.stage == "delta", self._counted_tokens
        if not self.has_first_token:
            self.has_first_token = True
            self._is_delta_due = not is_delta
            self._counted_tokens = 1
        elif is_delta:
            self._counted_tokens += not self._is_delta_due
            self._is_delta_due = False
        self._counted_tokens = max(self._counted_tokens, read.output_tokens)
        return self._counted_tokens - before
