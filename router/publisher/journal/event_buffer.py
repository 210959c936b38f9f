"""Events of a rank: those for the next batch, packed, and the last ones for range queries."""

from collections import deque
from itertools import islice

from router.protocol.events import ANY_TIER, CLEARED, EVENT_HEAD, STORED
from router.protocol.values import HashArray, Tier, pack_hashes

_NO_HEAD = bytes(EVENT_HEAD.size)


class EventBuffer:
    """The changes of one rank that are not in its log yet, in order.

    They are limited in events, blocks and bytes. Changes of one kind in one tier join the previous
    event, up to `event_blocks`. They do not join a sealed event, because its id and content may
    have been published. The head of the last event is written when the next one begins, or on
    reading.
    """

    __slots__ = (
        "_event_blocks",
        "_last",
        "_last_blocks",
        "_max_blocks",
        "_max_bytes",
        "_max_events",
        "_packed",
        "_sealed_count",
        "_starts",
    )

    _last: tuple[int, int] | None
    _last_blocks: int
    _packed: bytearray
    _sealed_count: int
    _starts: list[int]

    def __init__(self, event_blocks: int, max_events: int, max_blocks: int, max_bytes: int) -> None:
        self._event_blocks = event_blocks
        self._max_events = max_events
        self._max_blocks = max_blocks
        self._max_bytes = max_bytes
        self.clear()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def block_count(self) -> int:
        """The number of blocks in the events."""
        return len(self._packed) // 8 - len(self._starts)

    @property
    def packed(self) -> bytes:
        """All events, one after the other."""
        self._finish_last()
        return bytes(self._packed)

    def has_room(self, block_count: int) -> bool:
        """Return whether a change of `block_count` blocks fits, with the heads of its events."""
        added = 1 + block_count // self._event_blocks
        words, events = len(self._packed) // 8, len(self._starts)
        return (
            events + added <= self._max_events
            and words - events + block_count <= self._max_blocks
            and 8 * (words + added + block_count) <= self._max_bytes
        )

    def add(self, kind: int, tier: int, sequence_hashes: HashArray) -> None:
        """Add stored or removed blocks; there must be room. O(bytes).

        `tier`: a tier, or the number of tiers plus the index of a class.
        """
        hashes = pack_hashes(sequence_hashes)
        while hashes:
            if self._last != (kind, tier) or self._last_blocks == self._event_blocks:
                self._begin(kind, tier)
            part = hashes[: 8 * (self._event_blocks - self._last_blocks)]
            self._packed += part
            self._last_blocks += len(part) // 8
            hashes = hashes[len(part) :]

    def add_nothing(self) -> None:
        """Add an event without blocks, for a message that has only other news."""
        self._begin(STORED, Tier.DEVICE)

    def add_clear(self, tier: int | None) -> None:
        """Add a clearing of a tier; None clears all tiers and drops the events not sealed."""
        if tier is None and len(self) > self._sealed_count:
            del self._packed[self._starts[self._sealed_count] :]
            del self._starts[self._sealed_count :]
            self._last = None
        self._begin(CLEARED, ANY_TIER if tier is None else tier)

    def seal(self) -> list[bytes]:
        """Seal all events. Returns those that were not sealed before."""
        self._finish_last()
        ends = [*self._starts[self._sealed_count + 1 :], len(self._packed)]
        starts = self._starts[self._sealed_count :]
        self._sealed_count = len(self)
        self._last = None
        return [bytes(self._packed[start:end]) for start, end in zip(starts, ends, strict=False)]

    def clear(self) -> None:
        """Drop all events: they are in the log now, or a checkpoint follows."""
        self._packed = bytearray()
        self._starts = []
        self._sealed_count = 0
        self._last = None
        self._last_blocks = 0

    def _begin(self, kind: int, tier: int) -> None:
        self._finish_last()
        self._starts.append(len(self._packed))
        self._packed += _NO_HEAD
        self._last, self._last_blocks = (kind, tier), 0

    def _finish_last(self) -> None:
        if self._last is not None:
            kind, tier = self._last
            EVENT_HEAD.pack_into(self._packed, self._starts[-1], kind, tier, 0, self._last_blocks)


class ReplayRing:
    """A ring of packed events with consecutive ids; beyond either limit the oldest are dropped."""

    __slots__ = ("_events", "_max_bytes", "_max_events", "_size_bytes", "last_event_id")

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self.restart(0)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def first_event_id(self) -> int:
        """The id of the oldest event; without events, the id of the next one."""
        return self.last_event_id - len(self._events) + 1

    def append(self, event: bytes) -> None:
        """Append the next event."""
        self._events.append(event)
        self._size_bytes += len(event)
        self.last_event_id += 1
        while len(self._events) > self._max_events or self._size_bytes > self._max_bytes:
            self._size_bytes -= len(self._events.popleft())

    def restart(self, last_event_id: int) -> None:
        """Drop all events; the next one follows this id."""
        self._events: deque[bytes] = deque()
        self._size_bytes = 0
        self.last_event_id = last_event_id

    def packed(self, first_event_id: int, last_event_id: int) -> bytes:
        """Return these events, which must be present, one after the other. O(bytes)."""
        start = first_event_id - self.first_event_id
        return b"".join(islice(self._events, start, last_event_id - self.first_event_id + 1))

    def check_invariants(self) -> None:
        """Assert that the limits hold, and that the recorded size is correct."""
        assert self._size_bytes == sum(map(len, self._events)) <= self._max_bytes
        assert len(self._events) <= self._max_events
