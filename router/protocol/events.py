"""Events about the blocks of a rank: stream `kv-{ns}-events`, one subject per rank, msgpack arrays.

Events are canonical and absolute: blocks are identified by sequence hash, packed as little-endian
u64, and applying an event twice changes nothing. Fields may be appended, never reordered.

A batch carries its events, and the rank's state after them, as one string of words (u64, little-
endian), which an index reads without creating a Python object for each:

    holes, four tiers │ counts, four tiers │ digests, four tiers │ doubts │ events …
    an event: kind | tier << 8 | blocks << 32 │ sequence hash │ …

Ranks of hybrid models also list the blocks of their classes (`router.protocol.hybrid`): in packed
events, class c has the number of tiers plus c in place of a tier.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct, msgpack

from router.errors import WireError
from router.protocol.hybrid import MAX_CLASSES, HybridState
from router.protocol.values import (
    I64_MAX,
    TIERS,
    DpRank,
    HeldState,
    Identity,
    PerTier,
    Rank,
    Tier,
    UInt,
    decode,
)

STORED, REMOVED, CLEARED = 1, 2, 3
"""Kinds of packed events."""

ANY_TIER = 255
"""The tier field of a packed event that clears every tier."""

STATE_WORDS = 3 * TIERS + 1
"""Words before the first event."""

EVENT_HEAD = struct.Struct("<BBHI")
"""The head of a packed event: kind, tier, zero, blocks."""

_STATE = struct.Struct("<13Q")


EventId: TypeAlias = Annotated[int, Meta(ge=1, le=I64_MAX)]


def _check_packed(hashes: bytes) -> None:
    if len(hashes) % 8:
        raise ValueError(f"{len(hashes)} bytes of hashes, not a multiple of 8")


class _PackedBlocks(Struct, frozen=True, array_like=True):
    tier: Tier
    sequence_hashes: bytes

    def __post_init__(self) -> None:
        _check_packed(self.sequence_hashes)

    @property
    def block_count(self) -> int:
        """The number of blocks."""
        return len(self.sequence_hashes) // 8


class Stored(_PackedBlocks, frozen=True, array_like=True):
    """Blocks added to a tier."""


class Removed(_PackedBlocks, frozen=True, array_like=True):
    """Blocks removed from a tier."""


class Cleared(Struct, frozen=True, array_like=True):
    """A tier that became empty; None: all tiers, and all classes."""

    tier: Tier | None = None


ClassIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_CLASSES)]


class _ClassBlocks(Struct, frozen=True, array_like=True):
    class_index: ClassIndex
    sequence_hashes: bytes

    def __post_init__(self) -> None:
        _check_packed(self.sequence_hashes)

    @property
    def block_count(self) -> int:
        """The number of blocks."""
        return len(self.sequence_hashes) // 8


class ClassStored(_ClassBlocks, frozen=True, array_like=True):
    """Blocks that a class of a hybrid model now holds."""


class ClassRemoved(_ClassBlocks, frozen=True, array_like=True):
    """Blocks that a class no longer holds."""


class ClassCleared(Struct, frozen=True, array_like=True):
    """A class that became empty."""

    class_index: ClassIndex


Event: TypeAlias = Stored | Removed | Cleared | ClassStored | ClassRemoved | ClassCleared


class EventBatch(Struct, frozen=True, array_like=True, tag="batch", gc=False):
    """Consecutive events of one rank; ids start at 1 in each incarnation.

    Decoding checks only the length of `packed`; the reader of the events validates the rest.
    `hybrid`: the classes after the last event; None unless the model is hybrid.
    """

    worker_id: UInt
    dp_rank: DpRank
    incarnation: UInt
    identity: Identity
    first_event_id: EventId
    last_event_id: EventId
    packed: Annotated[bytes, Meta(min_length=8 * (STATE_WORDS + 1))]
    hybrid: HybridState | None = None

    @property
    def rank(self) -> Rank:
        """The rank that holds the blocks."""
        return Rank(self.worker_id, self.dp_rank)

    @property
    def event_count(self) -> int:
        """The number of events."""
        return self.last_event_id - self.first_event_id + 1

    @property
    def events(self) -> tuple[Event, ...]:
        """The events, one object each. Raises WireError if they are malformed. O(blocks)."""
        return unpack_events(self.packed, self.event_count)

    @property
    def state(self) -> HeldState:
        """The blocks that the rank holds after the last event, in summary."""
        return unpack_state(self.packed)


def pack_batch(state: HeldState, events: Iterable[Event]) -> bytes:
    """Return a state and events as packed words. O(blocks)."""
    packed = [pack_state(state)]
    for event in events:
        kind, place = _kind_and_place(event)
        if isinstance(event, Cleared | ClassCleared):
            packed.append(EVENT_HEAD.pack(kind, place, 0, 0))
        else:
            packed.append(EVENT_HEAD.pack(kind, place, 0, event.block_count))
            packed.append(event.sequence_hashes)
    return b"".join(packed)


def _kind_and_place(event: Event) -> tuple[int, int]:
    """Return the first two fields of a packed event."""
    match event:
        case Cleared(tier):
            return CLEARED, ANY_TIER if tier is None else tier
        case ClassCleared(class_index):
            return CLEARED, TIERS + class_index
        case Stored(tier) | Removed(tier):
            return STORED if isinstance(event, Stored) else REMOVED, tier
        case ClassStored(class_index) | ClassRemoved(class_index):
            return STORED if isinstance(event, ClassStored) else REMOVED, TIERS + class_index


def unpack_events(
    packed: bytes, event_count: int, offset: int = 8 * STATE_WORDS
) -> tuple[Event, ...]:
    """Return the events from an offset on, one object each. O(blocks).

    The default offset is the end of a packed state. Raises WireError if they are malformed.
    """
    events = tuple(_unpack_events(packed, offset))
    if len(events) != event_count:
        raise WireError(f"{len(events)} events, not {event_count}")
    return events


def cleared_at(packed: bytes, offset: int) -> Cleared | ClassCleared:
    """Return the packed event at `offset`, which is known to clear something."""
    place = packed[offset + 1]
    if place == ANY_TIER:
        return Cleared()
    return Cleared(Tier(place)) if place < TIERS else ClassCleared(place - TIERS)


def pack_state(state: HeldState) -> bytes:
    """Return a state as packed words."""
    return _STATE.pack(*state.holes, *state.counts, *state.digests, state.doubts)


def unpack_state(packed: bytes) -> HeldState:
    """Return the state at the start of packed words."""
    words = _STATE.unpack_from(packed)
    return HeldState(_per_tier(words, 0), _per_tier(words, 1), _per_tier(words, 2), words[-1])


def unpack_doubts(packed: bytes) -> int:
    """Return the doubts in the state at the start of packed words."""
    doubts: int = _STATE.unpack_from(packed)[-1]
    return doubts


def _per_tier(words: tuple[int, ...], part: int) -> PerTier:
    first, second, third, fourth = words[part * TIERS : (part + 1) * TIERS]
    return first, second, third, fourth


def _unpack_events(packed: bytes, offset: int) -> Iterator[Event]:
    while offset < len(packed):
        if offset + 8 > len(packed):
            raise WireError(f"{len(packed) - offset} bytes left, not an event")
        kind, tier, zero, blocks = EVENT_HEAD.unpack_from(packed, offset)
        start, offset = offset + 8, offset + 8 + 8 * blocks
        if zero or offset > len(packed):
            raise WireError(f"an event of {blocks} blocks in {len(packed) - start} bytes")
        yield _event(kind, tier, packed[start:offset])


def _event(kind: int, tier: int, hashes: bytes) -> Event:
    if kind == CLEARED and not hashes and tier == ANY_TIER:
        return Cleared()
    if tier >= TIERS + MAX_CLASSES:
        raise WireError(f"tier {tier} (allowed: 0 to {TIERS + MAX_CLASSES - 1})")
    class_index = tier - TIERS
    if kind == STORED:
        return Stored(Tier(tier), hashes) if tier < TIERS else ClassStored(class_index, hashes)
    if kind == REMOVED:
        return Removed(Tier(tier), hashes) if tier < TIERS else ClassRemoved(class_index, hashes)
    if kind == CLEARED and not hashes:
        return Cleared(Tier(tier)) if tier < TIERS else ClassCleared(class_index)
    raise WireError(f"an event of kind {kind} with {len(hashes)} bytes of hashes")


class TierBlocks(_PackedBlocks, frozen=True, array_like=True):
    """Blocks held in one tier."""


class ClassBlocks(_ClassBlocks, frozen=True, array_like=True):
    """Blocks held by one class of a hybrid model."""


class Checkpoint(Struct, frozen=True, array_like=True, tag="checkpoint"):
    """The complete contents of a rank after `event_id`, replacing everything before it in the log.

    Split into `parts` messages if it would exceed the bus's message limit; `state` and `hybrid`
    describe the whole and are the same in every part.
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
    hybrid: HybridState | None = None
    class_blocks: tuple[ClassBlocks, ...] = ()

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
    """Return the bytes of a message of the event stream."""
    return msgpack.encode(message)


def decode_log_message(payload: bytes) -> LogMessage:
    """Return a message of the event stream. Raises WireError if the bytes are invalid."""
    return decode(_decoder.decode, payload)
