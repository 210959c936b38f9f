"""Whether an engine's live batches reach us at all: a topic that matches nothing is silent."""

_REPLAYS = 3
"""So many in a row have to bring what should have come live: one lost message proves nothing."""


class Unheard:
    """Evidence from one connection after another, that they deliver nothing of what is published.

    What was published before a connection stood is in the first replay, and says nothing.
    """

    __slots__ = ("_asked_cursor", "_is_first", "_replays", "topic")

    def __init__(self) -> None:
        self._asked_cursor = 0
        self.topic: bytes | None = None
        self.connected()

    def connected(self) -> None:
        """A new connection stands."""
        self._is_first = True
        self._replays = 0

    def live(self) -> None:
        """It delivers."""
        self._replays = 0

    def asked(self, cursor: int) -> None:
        """A replay is asked for, when this was the next batch."""
        self._asked_cursor = cursor

    def replayed(self, topic: bytes | None) -> None:
        """A replayed batch told its topic, or none."""
        self.topic = topic

    def replay_ended(self, cursor: int) -> None:
        """It is complete, and now this is the next batch."""
        if not self._is_first and cursor > self._asked_cursor:
            self._replays += 1
        self._is_first = False

    def problem(self, subscribed: str) -> str | None:
        """In words; None as long as there is no proof."""
        if self._replays < _REPLAYS:
            return None
        told = (
            ""
            if self.topic is None
            else f", which publishes {self.topic.decode(errors='replace')!r}"
        )
        return (
            f"its batches come by replay only, none live: we subscribe to topic {subscribed!r} of "
            f"the engine{told}; an empty topic takes all"
        )
