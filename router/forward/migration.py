"""Migration of an interrupted stream to another worker: prompt and generated tokens so far.

The continuation is requested by tokens, also for a chat if the tokens of its prompt are known. A
stream that could not continue consistently is not migrated.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.forward.apis.api import CHAT
from router.forward.request_body import CompletionRequest
from router.protocol.values import I64_MAX, number_in

_NEEDS_ITS_BEGINNING = (
    "tools",
    "functions",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "best_of",
    "suffix",
    "continue_final_message",
)
"""Fields that exclude migration: parsers and grammars keep state from the response's start."""

_OF_CHATS = (
    "messages",
    "max_completion_tokens",
    "tool_choice",
    "parallel_tool_calls",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "include_reasoning",
)
_NOTHING = (b"null", b"false", b"0", b"[]", b"1")


class Before(Struct, frozen=True):
    """The part of a response that the client has received: its head, and the number of tokens."""

    answer_id: str | None
    created: int | None
    is_chat: bool
    generated: int


_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def is_migratable(asked: CompletionRequest) -> bool:
    """Return whether a stream may be migrated: one prompt, one response, no stateful fields."""
    if not asked.api.can_continue:
        return False
    if not asked.is_stream or asked.read.n not in (None, 1) or asked.has_several_prompts:
        return False
    fields = asked.fields
    return all(bytes(fields.get(name, b"null")) in _NOTHING for name in _NEEDS_ITS_BEGINNING)


def continuation(
    asked: CompletionRequest, prompt: Sequence[int], generated: Sequence[int]
) -> bytes:
    """Return the body that requests the rest, for `/v1/completions`."""
    most = asked.max_tokens
    if most is None and asked.path != CHAT:
        most = 16  # the default of engines
    fields: dict[str, Any] = {
        "prompt": [*prompt, *generated],
        "max_tokens": None if most is None else max(1, most - len(generated)),
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    least = number_in(bytes(asked.fields.get("min_tokens", b"")).decode(), I64_MAX)
    if least is not None:
        fields["min_tokens"] = max(0, least - len(generated))
    return asked.to_engine(without=_OF_CHATS, **fields)


def left_tokens(asked: CompletionRequest, generated: int) -> int | None:
    """Return the number of tokens left for the rest, or None without a limit."""
    return None if asked.max_tokens is None else max(0, asked.max_tokens - generated)


def as_before(data: bytes, before: Before) -> bytes:
    """Return a chunk of the second engine with the format and id of the first.

    Raises msgspec's errors for an invalid chunk.
    """
    fields: dict[str, Any] = dict(_fields(data))
    answer_id, created, is_chat = before.answer_id, before.created, before.is_chat
    usage = msgspec.json.decode(fields.get("usage", b"null"), type=dict[str, Any] | None)
    if usage is not None:
        fields["usage"] = _whole_usage(usage, before.generated)
    fields |= {} if answer_id is None else {"id": answer_id}
    fields |= {} if created is None else {"created": created}
    if is_chat:
        fields["object"] = "chat.completion.chunk"
        choices = msgspec.json.decode(fields.get("choices", b"[]"), type=list[dict[str, Raw]])
        fields["choices"] = [_as_delta(choice) for choice in choices]
    return msgspec.json.encode(fields)


def ending(before: Before, model: str) -> bytes:
    """Return the last events of a response if the engine failed after the last token."""
    kind = "chat.completion.chunk" if before.is_chat else "text_completion"
    content: dict[str, Any] = {"delta": {}} if before.is_chat else {"text": ""}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
    head = {"id": before.answer_id, "object": kind, "created": before.created, "model": model}
    return b"data: " + msgspec.json.encode({**head, "choices": [choice]}) + b"\n\n"


def _whole_usage(usage: dict[str, Any], generated: int) -> dict[str, Any]:
    """Return the usage of the whole response: earlier output is not part of the prompt."""
    prompt_tokens = _number(usage.get("prompt_tokens"), generated) - generated
    completion_tokens = _number(usage.get("completion_tokens"), 0) + generated
    return {**usage, "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}


def _number(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _as_delta(choice: dict[str, Raw]) -> dict[str, Any]:
    content = {name: value for name, value in choice.items() if name != "text"}
    return {**content, "delta": {"content": choice.get("text", "")}}
