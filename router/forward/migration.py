"""The rest of a stream, asked of another worker: its prompt, and behind it what was generated.

By tokens, so that nothing is read anew: of a chat, too, whose prompt's tokens are known. What would
not go on as it began is not migrated.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.forward.bodies import CHAT, Asked

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
"""Fields whose answers depend on where they began: parsers and grammars keep a state."""

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
    """What the client has seen of an answer that goes on: under which head, so many tokens."""

    answer_id: str | None
    created: int | None
    is_chat: bool
    generated: int


_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def is_migratable(asked: Asked) -> bool:
    """Whether the rest of its stream could be another worker's. One prompt, one answer."""
    if not asked.is_stream or asked.read.n not in (None, 1) or asked.has_several_prompts:
        return False
    fields = asked.fields
    return all(bytes(fields.get(name, b"null")) in _NOTHING for name in _NEEDS_ITS_BEGINNING)


def continuation(asked: Asked, prompt: Sequence[int], generated: list[int]) -> bytes:
    """The body that asks for the rest, on `/v1/completions`."""
    most = asked.max_tokens
    if most is None and asked.path != CHAT:
        most = 16  # as engines have it, who say nothing
    fields: dict[str, Any] = {
        "prompt": [*prompt, *generated],
        "max_tokens": None if most is None else max(1, most - len(generated)),
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    least = asked.fields.get("min_tokens")
    if least is not None and bytes(least).isdigit():
        fields["min_tokens"] = max(0, int(bytes(least)) - len(generated))
    return asked.to_engine(without=_OF_CHATS, **fields)


def left_tokens(asked: Asked, generated: int) -> int | None:
    """How many the rest may have; None: nobody said."""
    return None if asked.max_tokens is None else max(0, asked.max_tokens - generated)


def as_before(data: bytes, before: Before) -> bytes:
    """A chunk of the second engine's, in the shape and under the id of the first's. Raises
    msgspec's errors for what is no chunk.
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
    """The last events of an answer that had all its tokens when its engine went."""
    kind = "chat.completion.chunk" if before.is_chat else "text_completion"
    said: dict[str, Any] = {"delta": {}} if before.is_chat else {"text": ""}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length"}
    head = {"id": before.answer_id, "object": kind, "created": before.created, "model": model}
    return b"data: " + msgspec.json.encode({**head, "choices": [choice]}) + b"\n\n"


def _whole_usage(usage: dict[str, Any], generated: int) -> dict[str, Any]:
    """What was generated before is no part of the prompt."""
    prompt_tokens = usage.get("prompt_tokens", generated) - generated
    completion_tokens = usage.get("completion_tokens", 0) + generated
    return {**usage, "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}


def _as_delta(choice: dict[str, Raw]) -> dict[str, Any]:
    said = {name: value for name, value in choice.items() if name != "text"}
    return {**said, "delta": {"content": choice.get("text", "")}}
