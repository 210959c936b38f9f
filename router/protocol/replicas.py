"""Messages between routers about their reservations: msgpack arrays, over core NATS or streams.

Every router numbers its frames from 1 in each incarnation. A frame contains the changes since the
frame before it, and ends with a count and a digest of everything that its sender has published so
far: a router that misses a frame notices with the next one, and requests a snapshot. Changes are
absolute: applied twice, they change nothing. Fields may be appended, never reordered.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, msgpack
from msgspec.structs import replace

from router.protocol.values import U64, Rank, TokenCount, UInt, decode

MAX_OUTPUT_BLOCKS = 1 << 22
"""The limit of accepted output blocks, more than any model generates."""

RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
OutputBlocks: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_OUTPUT_BLOCKS)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class Progress(Struct, frozen=True, array_like=True, gc=False):
    """The progress of a request. `decay_fraction`: the last one reported with a block."""

    is_prefill_complete: bool = False
    output_blocks: OutputBlocks = 0
    decay_fraction: Fraction | None = None


class SharedReservation(Struct, frozen=True, array_like=True):
    """A reservation as the other routers count it.

    `sequence_hashes`: packed, of blocks that requests can share. `own_blocks`: blocks of its prompt
    that cannot be shared. `cached_tokens` need not be computed.
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
        """Return whether another reservation differs in progress at most."""
        return replace(self, progress=other.progress) == other


class Frame(Struct, frozen=True, array_like=True, tag="frame"):
    """The changes at a router; each id occurs once.

    `count` and `digest`: of all published reservations.

    A frame without changes is a heartbeat, and repeats the number of the last frame with changes.
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
        """The number of changed reservations."""
        return len(self.added) + len(self.progressed) + len(self.freed)


class SnapshotPart(Struct, frozen=True, array_like=True, tag="snapshot"):
    """A part of all reservations that a router has published up to and including a frame."""

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
    """A request of a router for another router's snapshot."""

    asked_by: UInt


class PromptUsage(Struct, frozen=True, array_like=True, gc=False):
    """An engine's usage report for a computed prompt.

    `is_cached_told`: whether the engine reported how many tokens were cached. `output_tokens`: the
    generated ones, if the request has ended and its engine counts them.
    """

    prompt_tokens: TokenCount
    cached_tokens: TokenCount
    is_cached_told: bool = True
    output_tokens: TokenCount | None = None


class PrefillCompleted(Struct, frozen=True, array_like=True, tag="prefill_completed"):
    """A report that the prompt of a request is computed."""

    usage: PromptUsage | None = None
    in_batch: bool = False


class OutputBlockAdded(Struct, frozen=True, array_like=True, tag="output_block"):
    """A report that the output of a request grew by a block.

    `in_batch`: the caller reports from time to time.
    """

    decay_fraction: Fraction | None = None
    in_batch: bool = False


class ReservationFreed(Struct, frozen=True, array_like=True, tag="freed"):
    """A report that a request ended, or that another router has taken it over."""

    usage: PromptUsage | None = None


CallerTold: TypeAlias = PrefillCompleted | OutputBlockAdded | ReservationFreed


class ProgressTold(Struct, frozen=True, array_like=True, tag="told"):
    """A caller's report to a router about a request that the receiving router has booked."""

    request_id: RequestId
    told: CallerTold


class HandedOver(Struct, frozen=True, array_like=True, tag="handed_over"):
    """Reservations that a stopping router hands over to the receiver.

    The receiver confirms each reservation that it takes by reporting it as freed.
    """

    router_id: UInt
    reservations: tuple[SharedReservation, ...]

    @property
    def request_ids(self) -> list[str]:
        """The ids of the reservations."""
        return [each.request_id for each in self.reservations]


PeerMessage: TypeAlias = Frame | SnapshotPart | ProgressTold | HandedOver
"""The messages that change reservations."""

ReplicaMessage: TypeAlias = PeerMessage | SnapshotWanted


# ── Streams between routers without a bus ────────────────────────────────────────────────────────


class PeerGreeting(Struct, frozen=True):
    """The identity of a router, at the beginning of a stream.

    Routers share reservations only if their `namespace` and `scheme` are equal. `scheme`: how
    blocks are named in bookings (`HashKeying.booking_scheme`).
    """

    router_id: UInt
    incarnation: UInt
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    namespace: Annotated[str, Meta(min_length=1, max_length=64)]
    scheme: Annotated[str, Meta(max_length=256)]


PeerState: TypeAlias = Literal["trying", "connected", "unreachable", "refused", "itself", "doubled"]


class PeerView(Struct, frozen=True):
    """Another router without a bus, as `/ready?verbose` shows it.

    `since_unix_s`: the time of the last change of `state`. `itself`: the address is this router's;
    `doubled`: another address leads to the same router.
    """

    address: str
    state: PeerState
    since_unix_s: float
    name: str | None = None
    problem: str | None = None


_decoder: msgpack.Decoder[ReplicaMessage] = msgpack.Decoder(ReplicaMessage)


def encode_replica_message(message: ReplicaMessage) -> bytes:
    """Return the bytes of a message between routers."""
    return msgpack.encode(message)


def decode_replica_message(payload: bytes) -> ReplicaMessage:
    """Return a message between routers. Raises WireError if the bytes are invalid."""
    return decode(_decoder.decode, payload)
