"""What processes that forward tell each other of prompts that workers of role prefill computed."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, msgpack

from router.protocol.codec import decode
from router.protocol.values import Endpoint, Name, TokenCount, UInt


class PrefillEvent(Struct, frozen=True, kw_only=True):
    """A prompt was computed, or its worker has failed it. `forwarder_id`: who tells it, of this
    life.
    """

    forwarder_id: UInt
    outcome: Literal["computed", "failed"]
    model_name: Name
    worker_id: UInt
    endpoint: Endpoint
    isl_tokens: TokenCount
    seconds: Annotated[float, Meta(ge=0)]


_decoder = msgpack.Decoder(PrefillEvent)


def encode_prefill_event(event: PrefillEvent) -> bytes:
    """Its bytes."""
    return msgpack.encode(event)


def decode_prefill_event(payload: bytes) -> PrefillEvent:
    """An event. Raises WireError for foreign bytes."""
    return decode(_decoder.decode, payload)
