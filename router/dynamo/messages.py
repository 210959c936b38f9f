"""What a Dynamo fleet says on NATS, decoded: the forms of 1.0.2 and of 1.6.1.

    JetStream   JSON                 one RouterEvent                                       1.0.2
    core NATS   msgpack envelope     around msgpack: one RouterEvent                       1.0.2
                                     around msgpack: an array of RouterEvents              1.6.1
                                     around an ActiveLoad, an ActiveSequenceEvent, …       both

Blocks have two names there: `block_hash` is the engine's own, opaque; `tokens_hash` is the local
hash of one block's content, LoRA and salt included, by the very rule that we hash prompts by.
Fields that nobody here knows are passed over. Of an array, a bad event falls alone.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from router.errors import WireError
from router.protocol.codec import T, decode
from router.protocol.values import U64, U64_MAX, DpRank, Rank, Tier, UInt

MAX_MESSAGE_BYTES = 8 << 20
"""A larger message is refused unread; NATS itself allows 1 MiB unless told otherwise."""

MAX_EVENTS = 65_536
"""Of one message."""

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
    """A block by both its names. What multimodal objects it shows is in `tokens_hash` already."""

    block_hash: U64
    tokens_hash: U64


class StoredBlocks(Struct, frozen=True):
    """Consecutive blocks, the first behind `parent_hash`; None: at the start of a prompt."""

    blocks: Annotated[list[StoredBlock], Meta(max_length=MAX_EVENT_BLOCKS)]
    parent_hash: U64 | None = None


class RemovedBlocks(Struct, frozen=True):
    """Blocks, in no order."""

    block_hashes: Annotated[list[U64], Meta(max_length=MAX_EVENT_BLOCKS)]


class Change(Struct, frozen=True):
    """One of the two."""

    stored: StoredBlocks | None = None
    removed: RemovedBlocks | None = None

    def __post_init__(self) -> None:
        if (self.stored is None) == (self.removed is None):
            raise ValueError("`data` is none of `stored`, `removed`, `cleared`")


class CacheEvent(Struct, frozen=True):
    """What happened to one rank's cache, in its turn: ids count from 0 (1.0.2) or from 1."""

    event_id: UInt
    data: Change | Literal["cleared"]
    dp_rank: DpRank = 0


class RouterEvent(Struct, frozen=True):
    """An event, and whose it is. Blocks of a `cache_owner` are no worker's."""

    worker_id: U64
    event: CacheEvent
    storage_tier: str = "device"
    residency_domain: str = "worker"

    @property
    def rank(self) -> Rank:
        """The rank whose cache changed."""
        return Rank(self.worker_id, self.event.dp_rank)

    @property
    def tier(self) -> Tier | None:
        """Where the blocks lie; None: nowhere that a worker is credited for."""
        return _TIERS.get(self.storage_tier) if self.residency_domain == "worker" else None


class Envelope(Struct, frozen=True):
    """Around everything on core NATS. `sequence` counts a publisher's messages, from 0."""

    publisher_id: U64
    sequence: UInt
    topic: str
    payload: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]


class EventMessage(Struct, frozen=True):
    """The events of one message, and what was wrong with those that fell.

    `first_event_id`: which id the life of a cache begins with in this form. `publisher_id` and
    `sequence` are the envelope's; None on JetStream.
    """

    events: list[RouterEvent]
    refusals: list[str]
    first_event_id: int
    publisher_id: int | None = None
    sequence: int | None = None

    @property
    def counts_copies(self) -> bool:
        """Whether the publisher tells of every copy of a block: 1.0.2's do."""
        return self.first_event_id == 0


class ActiveLoad(Struct, frozen=True):
    """How busy a rank is, as its worker or one of Dynamo's routers sees it."""

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
    """Where a request went."""

    worker_id: U64
    dp_rank: DpRank = 0


class PrefillLoadHint(Struct, frozen=True):
    """What 1.6.1 says instead of isl and overlap."""

    initial_effective_prefill_tokens: UInt


class AddRequest(Struct, frozen=True):
    """A request was placed. `token_sequence`: the sequence hashes of its full blocks; None where
    Dynamo's router does not track active blocks, and random where it assumes no reuse.
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
    """What one of Dynamo's routers, or a worker, says of a request."""

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
    """A message of the JetStream stream. Raises WireError."""
    event = _known("a RouterEvent in JSON", _json_event.decode, payload)
    _check_json(event)
    return EventMessage([event], [], first_event_id=0)


def decode_envelope(payload: bytes) -> Envelope:
    """What is around a message on core NATS. Raises WireError."""
    return _known("an event-plane envelope", _envelope.decode, payload)


def decode_events(envelope: Envelope) -> EventMessage:
    """The events in an envelope. Raises WireError where there is nothing of the kind."""
    origin = (envelope.publisher_id, envelope.sequence)
    if not _is_array(envelope.payload):
        event = _known("a RouterEvent", _event.decode, envelope.payload)
        return EventMessage([event], [], 0, *origin)
    raws = _known("an array of RouterEvents", _raw_events.decode, envelope.payload)
    try:
        return EventMessage(_events.decode(envelope.payload), [], 1, *origin)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return EventMessage(*_sorted_out(raws), 1, *origin)


def decode_load(envelope: Envelope) -> ActiveLoad:
    """A load message. Raises WireError."""
    return _known("an ActiveLoad", _load.decode, envelope.payload)


def decode_sequence(envelope: Envelope) -> SequenceEvent:
    """What is said of a request. Raises WireError."""
    event = _known("an ActiveSequenceEvent", _sequence.decode, envelope.payload)
    change = event.data.AddRequest if isinstance(event.data, _Added) else event.data
    rank = Rank(event.worker.worker_id, event.worker.dp_rank)
    return SequenceEvent(event.request_id, rank, change)


def decode_forward_pass(envelope: Envelope) -> int:
    """Which worker measured a forward pass; the measures themselves are for planners.

    Raises WireError.
    """
    worker_id = _known("forward-pass metrics", _forward_pass.decode, envelope.payload).worker_id
    if not worker_id.isdecimal() or int(worker_id) > U64_MAX:
        raise WireError(f"worker_id {worker_id!r} is no number")
    return int(worker_id)


def _known(what: str, decoder: Callable[[bytes], T], payload: bytes) -> T:
    """A payload of a version we know, or words that say which those are, and what to do."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(f"{len(payload)} bytes (allowed: at most {MAX_MESSAGE_BYTES})")
    try:
        return decode(decoder, payload)
    except WireError as error:
        raise WireError(f"not {what}: {error.reason}; {_VERSIONS}: {_MEND}") from error


def _is_array(payload: bytes) -> bool:
    """Whether these bytes begin as an array of msgpack does."""
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
    """JSON has integers of any size."""
    numbers = [event.worker_id, event.event.event_id]
    data = event.event.data
    if isinstance(data, Change) and data.stored is not None:
        numbers += [hash_ for b in data.stored.blocks for hash_ in (b.block_hash, b.tokens_hash)]
        numbers.append(data.stored.parent_hash or 0)
    elif isinstance(data, Change) and data.removed is not None:
        numbers += data.removed.block_hashes
    if max(numbers) > U64_MAX:
        raise WireError(f"an integer above {U64_MAX}")
