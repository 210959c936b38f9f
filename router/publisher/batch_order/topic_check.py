"""A check that an engine's live batches arrive: a topic that matches nothing is silent."""

_REPLAYS = 3
"""The number of consecutive replays with batches that were not received live: a single lost message
is no proof."""


class TopicCheck:
    """Evidence from consecutive replays that a connection delivers no live batches.

    The first replay contains batches published before the connection was made, so it is ignored.
    """

    __slots__ = ("_asked_cursor", "_is_first", "_replays", "topic")

    def __init__(self) -> None:
        self._asked_cursor = 0
        self.topic: bytes | None = None
        self.connected()

    def connected(self) -> None:
        """Start again with a new connection."""
        self._is_first = True
        self._replays = 0

    def live(self) -> None:
        """Record that a live batch was received."""
        self._replays = 0

    def replay_requested(self, cursor: int) -> None:
        """Record a request for a replay, with the number of the next batch."""
        self._asked_cursor = cursor

    def replayed(self, topic: bytes | None) -> None:
        """Record the topic of a replayed batch, or None if it has none."""
        self.topic = topic

    def replay_ended(self, cursor: int) -> None:
        """Record the end of a replay, with the number of the next batch."""
        if not self._is_first and cursor > self._asked_cursor:
            self._replays += 1
        self._is_first = False

    def problem(self, subscribed: str) -> str | None:
        """Return the problem as a text, or None without proof of one."""
        if self._replays < _REPLAYS:
            return None
        detail = (
            ""
            if self.topic is None
            else f", which publishes {self.topic.decode(errors='replace')!r}"
        )
        return (
            f"its batches come by replay only, none live: we subscribe to topic {subscribed!r} of "
            f"the engine{detail}; an empty topic takes all"
        )
