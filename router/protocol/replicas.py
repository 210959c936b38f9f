"""What routers tell each other about their reservations: core NATS, msgpack arrays.

Every router numbers its frames from 1 in each incarnation. A frame says what changed since the one
before it, and ends with a count and a digest of everything that its sender has told so far: whoever
misses a frame notices with the next one, and asks for a snapshot. What is told is absolute: told
twice, it changes nothing. Fields may be appended, never reordered.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct, msgpack
from msgspec.structs import replace

from router.protocol.codec import decode
from router.protocol.values import U64, Rank, TokenCount, UInt

MAX_OUTPUT_BLOCKS = 1 << 22
"""More than any model writes: nobody counts further on another's word."""

RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
OutputBlocks: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_OUTPUT_BLOCKS)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class Progress(Struct, frozen=True, array_like=True, gc=False):
    """How far a request has come. `decay_fraction`: the last that was told with a block."""

    is_prefill_complete: bool = False
    output_blocks: OutputBlocks = 0
    decay_fraction: Fraction | None = None


class SharedReservation(Struct, frozen=True, array_like=True):
    """A reservation as the other routers count it.

    `sequence_hashes`: packed, of blocks that requests can share; `own_blocks` of its prompt nobody
    can. `cached_tokens` need not be computed.
    """

    request_id: RequestId
    rank: Rank
    sequence_hashes: bytes
    own_blocks: UInt
    isl_tokens: UInt
    cached_tokens: UInt
    block_size: Annotated[int, Meta(ge=1, le=65_536)]
    progress: Progress = Progress()

    def __post_init__(self) -> None:
        if len(self.sequence_hashes) % 8:
            raise ValueError(f"{len(self.sequence_hashes)} bytes of hashes, not a multiple of 8")

    def is_same_booking(self, other: "SharedReservation") -> bool:
        """Does it differ in progress at most?"""
        return replace(self, progress=other.progress) == other


class Frame(Struct, frozen=True, array_like=True, tag="frame"):
    """What changed at a router; no id is named twice. `count` and `digest`: of all it has told.

    A frame without changes is a heartbeat, and repeats the number of the last one with some.
    """

    router_id: UInt
    incarnation: UInt
    sequence: UInt
    added: tuple[SharedReservation, ...]
    progressed: tuple[tuple[RequestId, Progress], ...]
    freed: tuple[RequestId, ...]
    count: UInt
    digest: U64

    @property
    def change_count(self) -> int:
        """How many reservations it tells of."""
        return len(self.added) + len(self.progressed) + len(self.freed)


class SnapshotPart(Struct, frozen=True, array_like=True, tag="snapshot"):
    """A part of all that a router has told up to, and with, a frame."""

    router_id: UInt
    incarnation: UInt
    sequence: UInt
    part: UInt
    parts: Annotated[int, Meta(ge=1, le=1 << 20)]
    reservations: tuple[SharedReservation, ...]

    def __post_init__(self) -> None:
        if self.part >= self.parts:
            raise ValueError(f"part {self.part} of {self.parts}")


class SnapshotWanted(Struct, frozen=True, array_like=True, tag="snapshot_wanted"):
    """A router asks another for all that it has told."""

    asked_by: UInt


class PromptUsage(Struct, frozen=True, array_like=True, gc=False):
    """What an engine said of a prompt, when it had computed it. Not `is_cached_told`: it did not
    say what was cached.
    """

    prompt_tokens: TokenCount
    cached_tokens: TokenCount
    is_cached_told: bool = True


class PrefillCompleted(Struct, frozen=True, array_like=True, tag="prefill_completed"):
    """Its prompt is computed."""

    usage: PromptUsage | None = None
    in_batch: bool = False


class OutputBlockAdded(Struct, frozen=True, array_like=True, tag="output_block"):
    """It grew by a block. What is told `in_batch` is told from time to time."""

    decay_fraction: Fraction | None = None
    in_batch: bool = False


class ReservationFreed(Struct, frozen=True, array_like=True, tag="freed"):
    """It ended, or has been booked anew at another router."""

    usage: PromptUsage | None = None


CallerTold: TypeAlias = PrefillCompleted | OutputBlockAdded | ReservationFreed


class ProgressTold(Struct, frozen=True, array_like=True, tag="told"):
    """A caller told a router about a request that the receiver has booked."""

    request_id: RequestId
    told: CallerTold


class HandedOver(Struct, frozen=True, array_like=True, tag="handed_over"):
    """A router that stops gives some of its reservations to the receiver, which says that it has
    taken one by telling the giver that it is freed.
    """

    router_id: UInt
    reservations: tuple[SharedReservation, ...]

    @property
    def request_ids(self) -> list[str]:
        """Of the reservations."""
        return [each.request_id for each in self.reservations]


PeerMessage: TypeAlias = Frame | SnapshotPart | ProgressTold | HandedOver
"""What changes who has booked what."""

ReplicaMessage: TypeAlias = PeerMessage | SnapshotWanted

_decoder: msgpack.Decoder[ReplicaMessage] = msgpack.Decoder(ReplicaMessage)


def encode_replica_message(message: ReplicaMessage) -> bytes:
    """The bytes of a message between routers."""
    return msgpack.encode(message)


def decode_replica_message(payload: bytes) -> ReplicaMessage:
    """A message between routers. Raises WireError for foreign bytes."""
    return decode(_decoder.decode, payload)
