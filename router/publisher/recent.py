"""The last events of a rank, to be told again to whoever missed them."""

from collections import deque
from itertools import islice


class RecentEvents:
    """A ring of packed events with consecutive ids; the oldest go first, beyond either bound."""

    __slots__ = ("_events", "_max_bytes", "_max_events", "_size_bytes", "last_event_id")

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self.restart(0)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def first_event_id(self) -> int:
        """Id of the oldest event; if there is none, the id that the next one gets."""
        return self.last_event_id - len(self._events) + 1

    def append(self, event: bytes) -> None:
        """The event after the last one."""
        self._events.append(event)
        self._size_bytes += len(event)
        self.last_event_id += 1
        while len(self._events) > self._max_events or self._size_bytes > self._max_bytes:
            self._size_bytes -= len(self._events.popleft())

    def restart(self, last_event_id: int) -> None:
        """Forget all: what is known next follows this id."""
        self._events: deque[bytes] = deque()
        self._size_bytes = 0
        self.last_event_id = last_event_id

    def packed(self, first_event_id: int, last_event_id: int) -> bytes:
        """These events, which must be there, one behind the other. O(bytes)."""
        start = first_event_id - self.first_event_id
        return b"".join(islice(self._events, start, last_event_id - self.first_event_id + 1))

    def check_invariants(self) -> None:
        """Assert that the bounds hold, and that what counts against them is what there is."""
        assert self._size_bytes == sum(map(len, self._events)) <= self._max_bytes
        assert len(self._events) <= self._max_events
