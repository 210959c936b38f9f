"""Live messages and the responses of a replay, frame by frame.

Only sums and fingerprints are kept, so that an engine with a long history costs little memory.
"""

from collections import Counter
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.publisher.batch_order.frames import END_OF_REPLAY, Numbered, parse_live, parse_replayed
from router.publisher.engine_events.decoder import bounded_name

MAX_FINGERPRINTS = 200_000
_MAX_NAMES = 32
_LIVE_FRAMES = 3
_TOPIC_ANSWER_FRAMES = 4


class Sequences:
    """Sequence numbers of batches in order of arrival, and fingerprints of the payloads."""

    __slots__ = ("count", "fingerprints", "first", "first_gap", "last", "missing", "returns")

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self.last: int | None = None
        self.missing = 0
        self.first_gap: tuple[int, int] | None = None
        self.returns = 0
        """Numbers not above their predecessor: a restart, or a repetition."""
        self.fingerprints: dict[int, int] = {}

    def add(self, sequence: int, payload: bytes) -> None:
        """Add the next batch."""
        if self.last is None:
            self.first = sequence
        elif sequence <= self.last:
            self.returns += 1
        elif sequence > self.last + 1:
            self.first_gap = self.first_gap or (self.last, sequence)
            self.missing += sequence - self.last - 1
        self.count += 1
        self.last = sequence
        if len(self.fingerprints) < MAX_FINGERPRINTS:
            self.fingerprints[sequence] = xxh3_64_intdigest(payload)

    def has(self, sequence: int, payload: bytes) -> bool:
        """Return whether the same payload arrived under this number."""
        return self.fingerprints.get(sequence) == xxh3_64_intdigest(payload)


class ObservedLive:
    """The messages of a subscription to every topic; `losses` counts lost connections."""

    __slots__ = (
        "frame_counts",
        "garbage",
        "is_connected",
        "losses",
        "sequences",
        "topics",
        "watched_s",
    )

    def __init__(self) -> None:
        self.is_connected = False
        self.losses = 0
        self.watched_s = 0.0
        self.frame_counts: Counter[int] = Counter()
        self.garbage = 0
        """Messages of three frames without a sequence of eight bytes in the middle."""
        self.topics: Counter[str] = Counter()
        self.sequences = Sequences()

    def take(self, frames: Sequence[bytes]) -> bytes | None:
        """Record a message; return its payload, or None if it has none."""
        self.frame_counts[len(frames)] += 1
        numbered = parse_live(frames)
        if numbered is None:
            self.garbage += len(frames) == _LIVE_FRAMES
            return None
        _note_topic(self.topics, frames[0])
        self.sequences.add(*numbered)
        return numbered[1]


class ObservedReplay:
    """The responses of a replay from batch 0; `has_ended` is True after its end marker."""

    __slots__ = (
        "differing",
        "failure",
        "garbage",
        "has_ended",
        "same",
        "sequences",
        "topics",
        "with_topic",
        "without_topic",
    )

    def __init__(self) -> None:
        self.has_ended = False
        self.failure: str | None = None
        """The reason for an end without the marker."""
        self.garbage = 0
        self.with_topic = 0
        self.without_topic = 0
        self.topics: Counter[str] = Counter()
        self.sequences = Sequences()
        self.same = 0
        """Batches that also arrived live, byte for byte equal."""
        self.differing = 0

    def take(self, frames: Sequence[bytes], live: Sequences) -> Numbered | None:
        """Record a response and compare it with the live batches; return its batch, if any."""
        numbered = parse_replayed(frames)
        if numbered is None:
            self.garbage += 1
            return None
        if numbered[0] == END_OF_REPLAY:
            self.has_ended = True
            return None
        if len(frames) == _TOPIC_ANSWER_FRAMES:
            self.with_topic += 1
            _note_topic(self.topics, frames[1])
        else:
            self.without_topic += 1
        self.sequences.add(*numbered)
        if numbered[0] in live.fingerprints:
            self.same += live.has(*numbered)
            self.differing += not live.has(*numbered)
        return numbered


def _note_topic(topics: Counter[str], topic: bytes) -> None:
    if len(topics) < _MAX_NAMES:
        topics[bounded_name(topic.decode(errors="backslashreplace"))] += 1
