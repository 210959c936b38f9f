"""What routers tell each other about bookings: `kv.{ns}.sequences`, core NATS, msgpack arrays."""

from typing import TypeAlias

from msgspec import Struct, msgpack

from router.protocol.codec import decode
from router.protocol.values import Rank, UInt


class ReservationAdded(Struct, frozen=True, array_like=True, tag="added"):
    """A request was booked; hashes are packed little-endian u64."""

    sequence_hashes: bytes
    isl_tokens: UInt
    overlap_blocks: UInt
    expected_output_tokens: UInt | None = None


class PrefillCompleted(Struct, frozen=True, array_like=True, tag="prefill_completed"):
    """Its prefill is over."""


class OutputBlockAdded(Struct, frozen=True, array_like=True, tag="output_block"):
    """It grew by a block."""

    decay_fraction: float | None = None


class ReservationFreed(Struct, frozen=True, array_like=True, tag="freed"):
    """It ended, or expired."""


Change: TypeAlias = ReservationAdded | PrefillCompleted | OutputBlockAdded | ReservationFreed


class ReservationEvent(Struct, frozen=True, array_like=True):
    """One step in the life of a reservation, and the router that saw it."""

    router_id: UInt
    request_id: str
    rank: Rank
    change: Change


_decoder = msgpack.Decoder(ReservationEvent)


def encode_reservation(event: ReservationEvent) -> bytes:
    """The bytes of a reservation event."""
    return msgpack.encode(event)


def decode_reservation(payload: bytes) -> ReservationEvent:
    """A reservation event. Raises WireError for foreign bytes."""
    return decode(_decoder.decode, payload)
