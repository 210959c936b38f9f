"""What an agent is asked about a rank's events: `kv.{ns}.worker.{rank}.events`, msgpack.

    {"start_event_id": 7, "end_event_id": 9}     both optional, both inclusive

    Events         these events, the end clamped to the newest one
    Checkpoint     everything held, in parts, where the start is missing or too old to be told again
    TooNew         the start has not happened yet
    InvalidRange   the end lies before the start
    Refused        the question is none, or too many wait

Every message of an answer goes to the asker's reply subject; a checkpoint has `parts` of them. Ids
count within an incarnation, which every answer about events names. What an agent says here may not
be in the log yet.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct, msgpack

from router.protocol.codec import decode
from router.protocol.events import Checkpoint, Event, unpack_events
from router.protocol.values import U64_MAX, Identity, UInt


class RangeRequest(Struct, frozen=True):
    """Which events? Without a start: everything held. Without an end: up to the newest."""

    start_event_id: UInt | None = None
    end_event_id: UInt | None = None

    def __post_init__(self) -> None:
        if max(self.start_event_id or 0, self.end_event_id or 0) > U64_MAX:
            raise ValueError(f"Expected `int` <= {U64_MAX}, got a larger event id")


class Events(Struct, frozen=True, array_like=True, tag="events"):
    """Consecutive events of the rank; `packed` as in a batch, without a state before them."""

    incarnation: UInt
    identity: Identity
    first_event_id: Annotated[int, Meta(ge=1)]
    last_event_id: Annotated[int, Meta(ge=1)]
    packed: bytes

    @property
    def events(self) -> tuple[Event, ...]:
        """The events, one object each. Raises WireError where they are malformed. O(blocks)."""
        return unpack_events(self.packed, self.last_event_id - self.first_event_id + 1, offset=0)


class TooNew(Struct, frozen=True, array_like=True, tag="too_new"):
    """Nothing has happened since: the newest event is older than the start asked for."""

    incarnation: UInt
    requested_start: UInt
    requested_end: UInt | None
    newest_available: UInt


class InvalidRange(Struct, frozen=True, array_like=True, tag="invalid_range"):
    """The end lies before the start."""

    start_id: UInt
    end_id: UInt


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """Why there is no answer: a sentence, a code for programs, and of a bad field its name, what
    was wrong with it, and what is allowed.
    """

    error: str
    code: str
    field: str | None = None
    reason: str | None = None
    allowed: str | None = None


RangeAnswer: TypeAlias = Events | Checkpoint | TooNew | InvalidRange | Refused

_request_decoder = msgpack.Decoder(RangeRequest)
_answer_decoder: msgpack.Decoder[RangeAnswer] = msgpack.Decoder(RangeAnswer)


def encode_range_request(request: RangeRequest) -> bytes:
    """The bytes of a question."""
    return msgpack.encode(request)


def decode_range_request(payload: bytes) -> RangeRequest:
    """A question. Raises what msgspec raises, so that the error can name the field."""
    return _request_decoder.decode(payload)


def encode_range_answer(answer: RangeAnswer) -> bytes:
    """The bytes of one message of an answer."""
    return msgpack.encode(answer)


def decode_range_answer(payload: bytes) -> RangeAnswer:
    """One message of an answer. Raises WireError for foreign bytes."""
    return decode(_answer_decoder.decode, payload)
