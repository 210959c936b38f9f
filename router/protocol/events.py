"""Which blocks a rank holds: stream `kv-{ns}-events`, one subject per rank, msgpack arrays.

Events are canonical and absolute: blocks are named by sequence hash, packed as little-endian u64,
and applying an event twice changes nothing. Fields may be appended, never reordered.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct, msgpack

from router.protocol.codec import decode
from router.protocol.values import DpRank, HeldState, Identity, Rank, Tier, UInt


class _PackedBlocks(Struct, frozen=True, array_like=True):
    tier: Tier
    sequence_hashes: bytes

    def __post_init__(self) -> None:
        if len(self.sequence_hashes) % 8:
            raise ValueError(f"{len(self.sequence_hashes)} bytes of hashes, not a multiple of 8")

    @property
    def block_count(self) -> int:
        """How many blocks are named."""
        return len(self.sequence_hashes) // 8


class Stored(_PackedBlocks, frozen=True, array_like=True, tag="stored"):
    """These blocks are now in this tier."""


class Removed(_PackedBlocks, frozen=True, array_like=True, tag="removed"):
    """These blocks are no longer in this tier."""


class Cleared(Struct, frozen=True, array_like=True, tag="cleared"):
    """This tier is empty; None: every tier is."""

    tier: Tier | None = None


Event: TypeAlias = Stored | Removed | Cleared


class EventBatch(Struct, frozen=True, array_like=True, tag="batch"):
    """Consecutive events of one rank; ids start at 1 in each incarnation."""

    worker_id: UInt
    dp_rank: DpRank
    incarnation: UInt
    identity: Identity
    first_event_id: Annotated[int, Meta(ge=1)]
    events: Annotated[tuple[Event, ...], Meta(min_length=1)]
    state: HeldState

    @property
    def rank(self) -> Rank:
        """The rank that holds the blocks."""
        return Rank(self.worker_id, self.dp_rank)

    @property
    def last_event_id(self) -> int:
        """Id of the last event in the batch."""
        return self.first_event_id + len(self.events) - 1


class TierBlocks(_PackedBlocks, frozen=True, array_like=True):
    """Blocks held in one tier."""


class Checkpoint(Struct, frozen=True, array_like=True, tag="checkpoint"):
    """All that a rank holds after `event_id`, replacing everything before it in the log.

    Split into `parts` messages where it would exceed the bus's message limit; `state` describes the
    whole, the same in every part.
    """

    worker_id: UInt
    dp_rank: DpRank
    incarnation: UInt
    identity: Identity
    event_id: UInt
    part: UInt
    parts: Annotated[int, Meta(ge=1)]
    blocks: tuple[TierBlocks, ...]
    state: HeldState

    def __post_init__(self) -> None:
        if self.part >= self.parts:
            raise ValueError(f"part {self.part} of {self.parts}")

    @property
    def rank(self) -> Rank:
        """The rank that holds the blocks."""
        return Rank(self.worker_id, self.dp_rank)


LogMessage: TypeAlias = EventBatch | Checkpoint

_decoder: msgpack.Decoder[LogMessage] = msgpack.Decoder(LogMessage)


def encode_log_message(message: LogMessage) -> bytes:
    """The bytes of a message of the event stream."""
    return msgpack.encode(message)


def decode_log_message(payload: bytes) -> LogMessage:
    """A message of the event stream. Raises WireError for foreign bytes."""
    return decode(_decoder.decode, payload)
