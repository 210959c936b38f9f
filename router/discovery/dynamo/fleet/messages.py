"""Decoders of a Dynamo fleet's NATS messages, in the formats of 1.0.2 and of 1.6.1.

    JetStream   JSON                 one RouterEvent                                       1.0.2
    core NATS   msgpack envelope     around msgpack: one RouterEvent                       1.0.2
                                     around msgpack: an array of RouterEvents              1.6.1
                                     around an ActiveLoad, an ActiveSequenceEvent, …       both

Blocks have two hashes there. `block_hash` is the engine's own and opaque. `tokens_hash` is the
local hash of one block's content, LoRA and salt included, by the same rule as our prompt hashes.
Unknown fields are ignored. An invalid event of an array is dropped alone.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from router.errors import WireError
from router.protocol.values import (
    U64,
    U64_MAX,
    UNREADABLE,
    DpRank,
    Rank,
    T,
    Tier,
    UInt,
    decode,
    number_in,
)

MAX_MESSAGE_BYTES = 8 << 20
"""The limit of a message, refused undecoded beyond it; NATS itself allows 1 MiB by default."""

MAX_EVENTS = 65_536
"""The limit of events in one message."""

MAX_EVENT_BLOCKS = 131_072

_VERSIONS = "known are Dynamo 1.0.2 and 1.6.1"
_MEND = "run workers of these versions, or register their engines' ZMQ sockets instead"

_TIERS = {
    "device": Tier.DEVICE,
    "host_pinned": Tier.HOST,
    "disk": Tier.DISK,
    "external": Tier.REMOTE,
}


class StoredBlock(Struct, frozen=True, gc=False):
    """A block with both its hashes; `tokens_hash` already covers multimodal objects."""

    block_hash: U64
    tokens_hash: U64


class StoredBlocks(Struct, frozen=True):
    """Consecutive blocks.

    `parent_hash`: the hash before the first block; None at the start of a prompt.
    """

    blocks: Annotated[list[StoredBlock], Meta(max_length=MAX_EVENT_BLOCKS)]
    parent_hash: U64 | None = None


class RemovedBlocks(Struct, frozen=True):
    """Removed blocks, in no order."""

    block_hashes: Annotated[list[U64], Meta(max_length=MAX_EVENT_BLOCKS)]


class Change(Struct, frozen=True):
    """A store or a removal."""

    stored: StoredBlocks | None = None
    removed: RemovedBlocks | None = None

    def __post_init__(self) -> None:
        if (self.stored is None) == (self.removed is None):
            raise ValueError("`data` is none of `stored`, `removed`, `cleared`")


class CacheEvent(Struct, frozen=True):
    """A change of one rank's cache; ids are consecutive from 0 (1.0.2) or from 1 (1.6.1)."""

    event_id: UInt
    data: Change | Literal["cleared"]
    dp_rank: DpRank = 0


class RouterEvent(Struct, frozen=True):
    """An event with its worker; blocks in the residency `cache_owner` belong to no worker."""

    worker_id: U64
    event: CacheEvent
    storage_tier: str = "device"
    residency_domain: str = "worker"

    @property
    def rank(self) -> Rank:
        """The rank with the changed cache."""
        return Rank(self.worker_id, self.event.dp_rank)

    @property
    def tier(self) -> Tier | None:
        """The tier of the blocks; None if they count for no worker."""
        return _TIERS.get(self.storage_tier) if self.residency_domain == "worker" else None


class Envelope(Struct, frozen=True):
    """The envelope of every core NATS message; `sequence` counts a publisher's from 0."""

    publisher_id: U64
    sequence: UInt
    topic: str
    payload: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]


class EventMessage(Struct, frozen=True):
    """The events of one message, and the reasons why others were dropped.

    `first_event_id`: the first id in the life of a cache, in this format. `publisher_id` and
    `sequence` are the envelope's; None on JetStream.
    """

    events: list[RouterEvent]
    refusals: list[str]
    first_event_id: int
    publisher_id: int | None = None
    sequence: int | None = None

    @property
    def counts_copies(self) -> bool:
        """True if the publisher reports every copy of a block, as 1.0.2 does."""
        return self.first_event_id == 0


class ActiveLoad(Struct, frozen=True):
    """The load of a rank, as its worker or one of Dynamo's routers sees it."""

    worker_id: U64
    dp_rank: DpRank = 0
    active_decode_blocks: UInt | None = None
    active_prefill_tokens: UInt | None = None
    kv_used_blocks: UInt | None = None

    @property
    def rank(self) -> Rank:
        """The rank."""
        return Rank(self.worker_id, self.dp_rank)


class SequenceWorker(Struct, frozen=True):
    """The rank that a request was placed on."""

    worker_id: U64
    dp_rank: DpRank = 0


class PrefillLoadHint(Struct, frozen=True):
    """The expected prefill, which 1.6.1 sends in place of ISL and overlap."""

    initial_effective_prefill_tokens: UInt


class AddRequest(Struct, frozen=True):
    """A placed request.

    `token_sequence`: the sequence hashes of its full blocks; None if Dynamo's router does not track
    active blocks, and random if it assumes no reuse.
    """

    token_sequence: Annotated[list[U64], Meta(max_length=MAX_EVENT_BLOCKS)] | None = None
    isl: UInt | None = None
    overlap: UInt | None = None
    expected_output_tokens: UInt | None = None
    track_prefill_tokens: bool = True
    prefill_load_hint: PrefillLoadHint | None = None


class _ForwardPass(Struct, frozen=True):
    worker_id: str


class _Added(Struct, frozen=True):
    AddRequest: AddRequest


SequenceChange: TypeAlias = AddRequest | Literal["Free", "MarkPrefillCompleted"]


class _SequenceEvent(Struct, frozen=True):
    request_id: Annotated[str, Meta(min_length=1, max_length=256)]
    worker: SequenceWorker
    data: _Added | Literal["Free", "MarkPrefillCompleted"]


class SequenceEvent(Struct, frozen=True):
    """A change of a request, published by one of Dynamo's routers or a worker."""

    request_id: str
    rank: Rank
    change: SequenceChange


_json_event = msgspec.json.Decoder(RouterEvent)
_envelope = msgspec.msgpack.Decoder(Envelope)
_event = msgspec.msgpack.Decoder(RouterEvent)
_events = msgspec.msgpack.Decoder(list[RouterEvent])
_raw_events = msgspec.msgpack.Decoder(Annotated[list[Raw], Meta(max_length=MAX_EVENTS)])
_load = msgspec.msgpack.Decoder(ActiveLoad)
_sequence = msgspec.msgpack.Decoder(_SequenceEvent)
_forward_pass = msgspec.msgpack.Decoder(_ForwardPass)


def decode_json_event(payload: bytes) -> EventMessage:
    """Decode a message of the JetStream stream. Raises WireError."""
    event = _known("a RouterEvent in JSON", _json_event.decode, payload)
    _check_json(event)
    return EventMessage([event], [], first_event_id=0)


def decode_envelope(payload: bytes) -> Envelope:
    """Decode the envelope of a core NATS message. Raises WireError."""
    return _known("an event-plane envelope", _envelope.decode, payload)


def decode_events(envelope: Envelope) -> EventMessage:
    """Decode the events in an envelope. Raises WireError if it contains none."""
    origin = (envelope.publisher_id, envelope.sequence)
    if not _is_array(envelope.payload):
        event = _known("a RouterEvent", _event.decode, envelope.payload)
        return EventMessage([event], [], 0, *origin)
    raws = _known("an array of RouterEvents", _raw_events.decode, envelope.payload)
    try:
        return EventMessage(_events.decode(envelope.payload), [], 1, *origin)
    except UNREADABLE:
        return EventMessage(*_sorted_out(raws), 1, *origin)


def decode_load(envelope: Envelope) -> ActiveLoad:
    """Decode a load message. Raises WireError."""
    return _known("an ActiveLoad", _load.decode, envelope.payload)


def decode_sequence(envelope: Envelope) -> SequenceEvent:
    """Decode a change of a request. Raises WireError."""
    event = _known("an ActiveSequenceEvent", _sequence.decode, envelope.payload)
    change = event.data.AddRequest if isinstance(event.data, _Added) else event.data
    rank = Rank(event.worker.worker_id, event.worker.dp_rank)
    return SequenceEvent(event.request_id, rank, change)


def decode_forward_pass(envelope: Envelope) -> int:
    """Return the id of the worker that measured a forward pass. Raises WireError.

    The measurements themselves are for planners, and are ignored here.
    """
    worker_id = _known("forward-pass metrics", _forward_pass.decode, envelope.payload).worker_id
    number = number_in(worker_id, U64_MAX)
    if number is None:
        raise WireError(f"worker_id {worker_id[:32]!r} is not an unsigned 64-bit integer")
    return number


def _known(what: str, decoder: Callable[[bytes], T], payload: bytes) -> T:
    """Decode a payload; raise WireError with the known versions and the remedy if that fails."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(f"{len(payload)} bytes (allowed: at most {MAX_MESSAGE_BYTES})")
    try:
        return decode(decoder, payload)
    except WireError as error:
        raise WireError(f"not {what}: {error.reason}; {_VERSIONS}: {_MEND}") from error


def _is_array(payload: bytes) -> bool:
    """Return whether the bytes begin like a msgpack array."""
    first = payload[0] if payload else 0
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _sorted_out(raws: Iterable[Raw]) -> tuple[list[RouterEvent], list[str]]:
    events, refusals = [], []
    for index, raw in enumerate(raws):
        try:
            events.append(_known("a RouterEvent", _event.decode, bytes(raw)))
        except WireError as error:
            refusals.append(f"event {index}: {error.reason}")
    return events, refusals


def _check_json(event: RouterEvent) -> None:
    """Raise WireError for integers beyond 64 bits, which JSON allows."""
    numbers = [event.worker_id, event.event.event_id]
    data = event.event.data
    if isinstance(data, Change) and data.stored is not None:
        numbers += [hash_ for b in data.stored.blocks for hash_ in (b.block_hash, b.tokens_hash)]
        numbers.append(data.stored.parent_hash or 0)
    elif isinstance(data, Change) and data.removed is not None:
        numbers += data.removed.block_hashes
    if max(numbers) > U64_MAX:
        raise WireError(f"an integer above {U64_MAX}")
