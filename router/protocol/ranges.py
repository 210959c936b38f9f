"""Queries of a rank's events at its agent: `kv.{ns}.worker.{rank}.events`, msgpack.

    {"start_event_id": 7, "end_event_id": 9}     both optional, both inclusive

    Events         these events, the end clamped to the newest one
    Checkpoint     everything held, in parts, if the start is missing or no longer kept
    TooNew         the start has not happened yet
    InvalidRange   the end lies before the start
    Refused        the request is invalid, or too many are waiting

Every message of a response goes to the reply subject of the request; a checkpoint has `parts` of
them. Ids count within an incarnation, which every response about events contains. Events in a
response may not be in the log yet.
"""

from typing import TypeAlias

from msgspec import Struct, msgpack

from router.protocol.events import Checkpoint, Event, EventId, unpack_events
from router.protocol.values import U64_MAX, Identity, UInt, decode


class RangeRequest(Struct, frozen=True):
    """A range of events. Without a start: everything held. Without an end: up to the newest."""

    start_event_id: UInt | None = None
    end_event_id: UInt | None = None

    def __post_init__(self) -> None:
        if max(self.start_event_id or 0, self.end_event_id or 0) > U64_MAX:
            raise ValueError(f"Expected `int` <= {U64_MAX}, got a larger event id")


class Events(Struct, frozen=True, array_like=True, tag="events"):
    """Consecutive events of the rank; `packed` as in a batch, without a state before them."""

    incarnation: UInt
    identity: Identity
    first_event_id: EventId
    last_event_id: EventId
    packed: bytes

    @property
    def events(self) -> tuple[Event, ...]:
        """The events, one object each. Raises WireError if they are malformed. O(blocks)."""
        return unpack_events(self.packed, self.last_event_id - self.first_event_id + 1, offset=0)


class TooNew(Struct, frozen=True, array_like=True, tag="too_new"):
    """A range that starts after the newest event."""

    incarnation: UInt
    requested_start: UInt
    requested_end: UInt | None
    newest_available: UInt


class InvalidRange(Struct, frozen=True, array_like=True, tag="invalid_range"):
    """A range that ends before its start."""

    start_id: UInt
    end_id: UInt


class RangeRefused(Struct, frozen=True, array_like=True, tag="refused"):
    """The reason why a request failed.

    It has a message and a code for programs. For an invalid field, it has the field's name, what is
    wrong with it, and what is allowed.
    """

    error: str
    code: str
    field: str | None = None
    reason: str | None = None
    allowed: str | None = None


RangeAnswer: TypeAlias = Events | Checkpoint | TooNew | InvalidRange | RangeRefused

_request_decoder = msgpack.Decoder(RangeRequest)
_answer_decoder: msgpack.Decoder[RangeAnswer] = msgpack.Decoder(RangeAnswer)


def encode_range_request(request: RangeRequest) -> bytes:
    """Return the bytes of a request."""
    return msgpack.encode(request)


def decode_range_request(payload: bytes) -> RangeRequest:
    """Return a request. Raises msgspec's own errors, so that the response can name the field."""
    return _request_decoder.decode(payload)


def encode_range_answer(answer: RangeAnswer) -> bytes:
    """Return the bytes of one message of a response."""
    return msgpack.encode(answer)


def decode_range_answer(payload: bytes) -> RangeAnswer:
    """Return one message of a response. Raises WireError if the bytes are invalid."""
    return decode(_answer_decoder.decode, payload)
