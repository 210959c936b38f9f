"""The steps that the order of an engine's batches results in."""

from typing import TypeAlias

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.publisher.engine_events.batch import EngineBatch


class Batch(Struct, frozen=True, gc=False):
    """An undecoded batch of an engine. `fingerprint`: XXH3-64 of the payload."""

    sequence: int
    payload: bytes
    fingerprint: int


class Apply(Struct, frozen=True, gc=False):
    """A step: apply the next batch of the current life."""

    sequence: int
    payload: bytes


class ApplyDecoded(Struct, frozen=True, eq=False):
    """A step: apply a decoded batch of a polled engine; `sequence`: its first event's id."""

    sequence: int
    batch: EngineBatch


class Replay(Struct, frozen=True):
    """A step: request the engine's batches from `first` on; earlier requests are void."""

    first: int


class NewLife(Struct, frozen=True):
    """A step: another life of the engine begins; the effect of earlier batches is void."""

    reason: str


class Lost(Struct, frozen=True):
    """A step: batches are lost for good. `last`: None if their number is unknown."""

    first: int
    last: int | None
    reason: str


Step: TypeAlias = Apply | ApplyDecoded | Replay | NewLife | Lost


def batch_of(sequence: int, payload: bytes) -> Batch:
    """Return a received batch with its fingerprint."""
    return Batch(sequence, payload, xxh3_64_intdigest(payload))


class BatchOrderCounters:
    """Counters of batches and replays since the start of the process."""

    __slots__ = (
        "duplicates",
        "held_overflows",
        "lost_gaps",
        "new_lives",
        "replay_failures",
        "replays",
        "stale",
    )

    def __init__(self) -> None:
        self.duplicates = 0
        self.stale = 0
        self.held_overflows = 0
        self.replays = 0
        self.replay_failures = 0
        self.new_lives = 0
        self.lost_gaps = 0
