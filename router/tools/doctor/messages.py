"""Live messages and the answers of a replay, frame by frame.

Only sums and fingerprints are kept, so that an engine with a long history costs little memory.
"""

from collections import Counter
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.publisher.engine_events import bounded_name
from router.publisher.engine_frames import END_OF_REPLAY, Numbered, parse_live, parse_replayed

MAX_FINGERPRINTS = 200_000
_MAX_NAMES = 32
_LIVE_FRAMES = 3
_TOPIC_ANSWER_FRAMES = 4


class Sequences:
    """Numbers of batches in the order they came, and a fingerprint of each one's payload."""

    __slots__ = ("count", "fingerprints", "first", "first_gap", "last", "missing", "returns")

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self.last: int | None = None
        self.missing = 0
        self.first_gap: tuple[int, int] | None = None
        self.returns = 0
        """How often a number was not above the one before: a restart, or a repetition."""
        self.fingerprints: dict[int, int] = {}

    def add(self, sequence: int, payload: bytes) -> None:
        """Note the next batch."""
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
        """Did the same come under this number?"""
        return self.fingerprints.get(sequence) == xxh3_64_intdigest(payload)


class LiveSeen:
    """What a subscription to every topic brought. `losses`: how often the connection was lost."""

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
        """Of three frames, and yet without a sequence of eight bytes in the middle."""
        self.topics: Counter[str] = Counter()
        self.sequences = Sequences()

    def take(self, frames: Sequence[bytes]) -> bytes | None:
        """Note a message; its payload, if it has one."""
        self.frame_counts[len(frames)] += 1
        numbered = parse_live(frames)
        if numbered is None:
            self.garbage += len(frames) == _LIVE_FRAMES
            return None
        _note_topic(self.topics, frames[0])
        self.sequences.add(*numbered)
        return numbered[1]


class ReplaySeen:
    """What a replay from batch 0 on brought; `has_ended`: it said that this was all."""

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
        """Why it ended otherwise."""
        self.garbage = 0
        self.with_topic = 0
        self.without_topic = 0
        self.topics: Counter[str] = Counter()
        self.sequences = Sequences()
        self.same = 0
        """Batches that came live as well, byte for byte alike."""
        self.differing = 0

    def take(self, frames: Sequence[bytes], live: Sequences) -> Numbered | None:
        """Note an answer and hold it against what came live; the batch in it, if there is one."""
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
