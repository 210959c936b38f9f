"""Probe prompts on which a tokenizer and an engine must agree, and a description of differences."""

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from msgspec import Struct

from router.forward.apis.api import CHAT, COMPLETIONS, ApiPath
from router.forward.request_body import CompletionRequest, read_completion_request
from router.forward.tokenizer.chats import Kind

_TEXT = (
    "Hello, world! It's 1234567 km\u00a0to the \u201cmoon\u201d:\n\n\tdef f(x):\n"
    "        return x**2  # naïve café, Straße; Жизнь, 日本語のテキスト, שלום, 안녕, "
    "\U0001f469\u200d\U0001f467 e\u0301 \ufb01 \u2581 <0x41>\r\n   ok  "
)
_USER = {"role": "user", "content": "Why is the sky blue? \n Answer in 3 words."}
_ANSWER = {"role": "assistant", "content": " Rayleigh scattering,  mostly.\n"}
_SYSTEM = {"role": "system", "content": "You are brief."}
_PARTS = [{"type": "text", "text": "One,"}, {"type": "text", "text": "two."}]
_CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "sky", "arguments": '{"city": "Zürich"}'},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "sky",
        "description": "The sky's colour",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
MOST_ADDED = 16
"""Limit of added tokens in a probe's text; some tokenizers have thousands."""


class Probe(Struct, frozen=True):
    """One probe prompt.

    There are several per kind, because templates refuse some chats: at least one must be tokenized,
    and all that either side tokenizes must match.
    """

    kind: Kind
    asked: CompletionRequest


def probes(model: str, added: Sequence[str]) -> Iterator[Probe]:
    """Yield probes of every kind. `added`: texts of the tokenizer's added tokens."""
    special = f"a{' b'.join(added[:MOST_ADDED])}\n c{''.join(added[-MOST_ADDED:])} "
    for text in (_TEXT, special):
        yield _probe("text", COMPLETIONS, model, prompt=text)
    for chat in ([_USER], [_SYSTEM, _USER, _ANSWER, _USER]):
        yield _chat("chat", model, chat)
    yield _chat("parts", model, [{"role": "user", "content": _PARTS}])
    yield _chat("tools", model, [_USER], tools=[_TOOL])
    called = [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call12345", "content": "blue"},
    ]
    yield _chat("tools", model, called, tools=[_TOOL])
    yield _chat("continued", model, [_USER, _ANSWER], **_CONTINUED)


def difference(ours: Sequence[int] | None, theirs: Sequence[int] | None) -> str | None:
    """Return a description of the difference between two tokenizations, or None if they match.

    None for a tokenization means that this side refuses the prompt.
    """
    if ours == theirs:
        return None
    if ours is None or theirs is None:
        refuses = "the tokenizer" if ours is None else "the engine"
        return f"only {refuses} refuses a prompt"
    for one, other, who in ((ours, theirs, "the engine"), (theirs, ours, "the tokenizer")):
        if [*other[1:]] == [*one]:
            return f"only {who} begins with token {other[0]}, as a beginning-of-text"
        if [*other[:-1]] == [*one]:
            return f"only {who} ends with token {other[-1]}"
    at, (mine, its) = next(
        (n, pair) for n, pair in enumerate(zip_longest(ours, theirs)) if pair[0] != pair[1]
    )
    return f"token {at} of {len(ours)} is {mine} here, and {its} of {len(theirs)} in the engine"


def _chat(kind: Kind, model: str, messages: list[Any], **fields: Any) -> Probe:
    return _probe(kind, CHAT, model, messages=messages, **fields)


def _probe(kind: Kind, path: ApiPath, model: str, **fields: Any) -> Probe:
    return Probe(
        kind, read_completion_request(path, json.dumps({"model": model, **fields}).encode())
    )
