"""Events in the making, packed as a batch carries them (`router.protocol.events`)."""

from router.protocol.events import ANY_TIER, CLEARED, EVENT_HEAD
from router.protocol.values import HashArray, Tier, pack_hashes

_NO_HEAD = bytes(EVENT_HEAD.size)


class NotedEvents:
    """Changes of one rank, in order, that are not in its log yet; bounded in events, blocks, bytes.

    Changes of one kind in one tier join the event before them, up to `event_blocks`; but nothing is
    added to an event that is sealed, for its id has been told. The head of the last event is filled
    in when the next one begins, or somebody reads.
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
        """How many blocks are named."""
        return len(self._packed) // 8 - len(self._starts)

    @property
    def packed(self) -> bytes:
        """All events, one behind the other."""
        self._finish_last()
        return bytes(self._packed)

    def has_room(self, block_count: int) -> bool:
        """Whether a change of so many blocks fits, however many events it makes."""
        added = 1 + block_count // self._event_blocks
        words, events = len(self._packed) // 8, len(self._starts)
        return (
            events + added <= self._max_events
            and words - events + block_count <= self._max_blocks
            and 8 * (words + added + block_count) <= self._max_bytes
        )

    def add(self, kind: int, tier: Tier, sequence_hashes: HashArray) -> None:
        """Note that blocks were stored or removed; there has to be room. O(bytes)."""
        hashes = pack_hashes(sequence_hashes)
        while hashes:
            if self._last != (kind, tier) or self._last_blocks == self._event_blocks:
                self._begin(kind, tier)
            part = hashes[: 8 * (self._event_blocks - self._last_blocks)]
            self._packed += part
            self._last_blocks += len(part) // 8
            hashes = hashes[len(part) :]

    def add_clear(self, tier: Tier | None) -> None:
        """Note that a tier was emptied, or every one, which makes what is not sealed pointless."""
        if tier is None and len(self) > self._sealed_count:
            del self._packed[self._starts[self._sealed_count] :]
            del self._starts[self._sealed_count :]
            self._last = None
        self._begin(CLEARED, ANY_TIER if tier is None else tier)

    def seal(self) -> list[bytes]:
        """Leave every event as it is; those that were not sealed before."""
        self._finish_last()
        ends = [*self._starts[self._sealed_count + 1 :], len(self._packed)]
        starts = self._starts[self._sealed_count :]
        self._sealed_count = len(self)
        self._last = None
        return [bytes(self._packed[start:end]) for start, end in zip(starts, ends, strict=False)]

    def clear(self) -> None:
        """Forget everything: it is in the log now, or in a checkpoint to come."""
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
