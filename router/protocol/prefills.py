"""Events that forwarding processes publish about prompts computed by workers of role prefill."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, msgpack

from router.protocol.values import Endpoint, Name, TokenCount, UInt, decode


class PrefillEvent(Struct, frozen=True, kw_only=True):
    """A prompt that was computed, or that its worker failed to compute.

    `forwarder_id`: the incarnation of the forwarding process that publishes it.
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
    """Return the bytes of an event."""
    return msgpack.encode(event)


def decode_prefill_event(payload: bytes) -> PrefillEvent:
    """Return an event. Raises WireError if the bytes are invalid."""
    return decode(_decoder.decode, payload)
