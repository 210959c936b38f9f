"""A request as the chat that its engine makes of it, for tokenizers of chats."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.forward.apis.api import CHAT
from router.forward.apis.chats.dialect import Dialect
from router.forward.request_body import CompletionRequest, read_completion_request


class NoChatError(Exception):
    """The engine refuses this request, or nothing is known about what it makes of it."""


class ChatForm(Struct, frozen=True):
    """A request as a chat.

    `features`: what it consists of, as far as engines treat it by rules of its own; if they
    confirm a chat, chats of the same features are believed. `is_proven`: of features that are known
    to become these tokens. `keeps_last_tokens`: the prompt is cut to its last tokens.
    """

    chat: CompletionRequest
    features: frozenset[str] = frozenset()
    is_proven: bool = False
    keeps_last_tokens: int | None = None

    @property
    def has_images(self) -> bool:
        """True if the chat has images or other media."""
        return "media" in self.features


_PASSED_ON = ("add_special_tokens", "mm_processor_kwargs", "chat_template", "documents")
_kwargs = msgspec.json.Decoder(dict[str, Any] | None).decode


def chat_form(
    asked: CompletionRequest,
    dialect: Dialect,
    messages: list[Any],
    features: Iterable[str],
    *,
    tools: list[Any] | None = None,
    effort: str | None = None,
    proven: frozenset[str] = frozenset(),
    **fields: Any,
) -> ChatForm:
    """Return a request as a chat of these messages. `proven`: the features known to be right."""
    said: dict[str, Any] = {"model": asked.model, "messages": messages, **fields}
    if tools is not None:
        said["tools"] = tools
    said |= {name: asked.fields[name] for name in _PASSED_ON if name in asked.fields}
    kwargs = _kwargs(asked.fields.get("chat_template_kwargs", b"null"))
    if effort is not None:
        kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none", **(kwargs or {})}
    if kwargs is not None:
        said["chat_template_kwargs"] = kwargs
    found = frozenset(features)
    chat = read_completion_request(CHAT, msgspec.json.encode(said))
    return ChatForm(chat, found, is_proven=dialect.is_known and found <= proven)


def tool(name: str, description: str | None, parameters: Any, **more: Any) -> dict[str, Any]:
    """Return a tool in the format of chats."""
    function = {"name": name, "description": description, "parameters": parameters, **more}
    return {"type": "function", "function": function}


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the format of chats."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def is_set(value: Raw | None) -> bool:
    """Return whether a field is there, and not null."""
    return value is not None and bytes(value) not in (b"", b"null")
