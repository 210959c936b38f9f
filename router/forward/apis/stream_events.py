"""The events of streams that name their types: Responses and Messages.

They pass byte for byte. Only what the router needs is read: the first token, the number of tokens,
the usage, and the end.
"""

from typing import Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from router.forward.apis.reported_usage import MessagesUsage, ResponsesUsage
from router.protocol.requests import Usage

Stage: TypeAlias = Literal["before", "begun", "delta", "end", "error"]
"""`before`: no token has been generated yet; `begun`: at least one has; `delta`: one more."""

_BEFORE_A_RESPONSE = frozenset(("response.created", "response.queued", "response.in_progress"))
_ENDS_OF_A_RESPONSE = frozenset(
    ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
)
_OF_FIRST_CHUNKS = "chatcmpl-"
"""The beginning of a message's id that an engine took from the first chunk of a chat: vLLM sends
`message_start` with the first token, others before it."""


class StreamEvent(Struct, frozen=True):
    """One event. `output_tokens`: all that were generated, where the event reports them."""

    stage: Stage
    usage: Usage | None = None
    output_tokens: int = 0
    answer_id: str | None = None


class _Response(Struct, frozen=True):
    id: str | None = None
    usage: ResponsesUsage | None = None


class _Message(Struct, frozen=True):
    id: str | None = None
    usage: MessagesUsage | None = None


class _Type(Struct, frozen=True):
    type: str = ""
    response: Raw = Raw(b"null")
    message: Raw = Raw(b"null")
    usage: Raw = Raw(b"null")


_type = msgspec.json.Decoder(_Type).decode
_response = msgspec.json.Decoder(_Response | None).decode
_message = msgspec.json.Decoder(_Message | None).decode
_usage = msgspec.json.Decoder(MessagesUsage | None).decode


def event_of_responses(data: bytes) -> StreamEvent:
    """Read an event of Responses. Raises msgspec's errors."""
    event = _type(data)
    kind = event.type
    if kind.endswith(".delta"):
        return StreamEvent("delta")
    if kind == "error":
        return StreamEvent("error")
    if kind in _BEFORE_A_RESPONSE:
        response = _response(event.response)
        return StreamEvent("before", answer_id=None if response is None else response.id)
    if kind not in _ENDS_OF_A_RESPONSE:
        return StreamEvent("begun")
    response = _response(event.response)
    if response is None or response.usage is None:
        return StreamEvent("end")
    return StreamEvent("end", response.usage.prompt, response.usage.output_tokens, response.id)


def event_of_messages(data: bytes) -> StreamEvent:
    """Read an event of Messages. Raises msgspec's errors."""
    event = _type(data)
    match event.type:
        case "content_block_delta":
            return StreamEvent("delta")
        case "message_start":
            message = _message(event.message) or _Message()
            is_first_token = (message.id or "").startswith(_OF_FIRST_CHUNKS)
            usage = None if message.usage is None else message.usage.prompt
            return StreamEvent("begun" if is_first_token else "before", usage)
        case "message_delta":
            reported = _usage(event.usage) or MessagesUsage()
            return StreamEvent("begun", reported.prompt, reported.output_tokens)
        case "message_stop":
            return StreamEvent("end")
        case "ping":
            return StreamEvent("before")
        case "error":
            return StreamEvent("error")
        case _:
            return StreamEvent("begun")
