"""What the order of an engine's batches asks to be done, one step after the other."""

from typing import TypeAlias

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.publisher.engine_batch import EngineBatch


class Batch(Struct, frozen=True, gc=False):
    """An engine's batch, undecoded. `fingerprint` is XXH3-64 of the payload."""

    sequence: int
    payload: bytes
    fingerprint: int


class Apply(Struct, frozen=True, gc=False):
    """This batch is the next one of the present life."""

    sequence: int
    payload: bytes


class ApplyDecoded(Struct, frozen=True, eq=False):
    """The same, where the engine was asked: decoded already, named by its first event's id."""

    sequence: int
    batch: EngineBatch


class Replay(Struct, frozen=True):
    """Ask the engine for its batches from `first` on; whatever was asked before is void."""

    first: int


class NewLife(Struct, frozen=True):
    """What follows is of another life of the engine: nothing that was applied counts any more."""

    reason: str


class Lost(Struct, frozen=True):
    """Batches that nobody can bring back. `last` is None where nobody knows how many."""

    first: int
    last: int | None
    reason: str


Step: TypeAlias = Apply | ApplyDecoded | Replay | NewLife | Lost


def batch_of(sequence: int, payload: bytes) -> Batch:
    """A batch as it came from the wire."""
    return Batch(sequence, payload, xxh3_64_intdigest(payload))


class EngineLogCounters:
    """What happened to batches and replays since the start of the process."""

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
