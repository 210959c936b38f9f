"""The fields of a chat request that determine its tokens."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Raw, Struct

from router.forward.tokenizer.errors import NotLocalError, PromptRefusedError
from router.protocol.values import UNREADABLE

Kind: TypeAlias = Literal["text", "chat", "parts", "tools", "continued"]
"""Kinds of prompts; a tokenizer may agree with engines on one kind and differ on another."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_RESERVED = frozenset(
    ("messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
     "continue_final_message", "conversation", "return_dict")
)  # fmt: skip
_FOR_ENGINES = ("chat_template", "documents", "truncate_prompt_tokens", "mm_processor_kwargs")


class Part(Struct, frozen=True):
    """A part of a message."""

    type: str | None = None
    text: str | None = None


class Message(Struct, frozen=True):
    """A message of a chat."""

    role: str
    content: str | list[str | Part] | None = None
    name: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    task: Any = None
    tool_call_id: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    tools: Any = None


class Function(Struct, frozen=True):
    """The function of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    """A tool that a model may call."""

    function: Function
    type: Literal["function"] = "function"

    def described(self) -> dict[str, Any]:
        """Return the tool for a template, in this field order, which templates may print."""
        function = msgspec.to_builtins(self.function)
        if self.function.strict is None:
            del function["strict"]
        return {"type": self.type, "function": function}


class Chat(Struct, frozen=True, kw_only=True):
    """The fields that determine the tokens of a chat."""

    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def kind(self) -> Kind:
        """The most unusual kind that applies."""
        if self.continue_final_message:
            return "continued"
        if self.tools is not None or any(
            each.tool_calls or each.role == "tool" for each in self.messages
        ):
            return "tools"
        return "parts" if any(isinstance(m.content, list) for m in self.messages) else "chat"


_messages = msgspec.json.Decoder(list[Message]).decode
_others = msgspec.json.Decoder(Chat, strict=True).decode
_NAMES = tuple(field.name for field in msgspec.structs.fields(Chat) if field.name != "messages")


def read_chat(fields: Mapping[str, Raw]) -> Chat:
    """Parse a chat from a request's fields.

    Raises PromptRefusedError for invalid messages, NotLocalError for options that only engines
    support.
    """
    messages = read_messages(bytes(fields["messages"]))
    given = {name: fields[name] for name in _NAMES if name in fields and not _is_null(fields[name])}
    for name in _FOR_ENGINES:
        if name in fields and not _is_null(fields[name]):
            raise NotLocalError(name)
    try:
        chat = _others(msgspec.json.encode({**given, "messages": []}))
    except UNREADABLE as error:
        raise NotLocalError(str(error)) from error
    _check(chat)
    return msgspec.structs.replace(chat, messages=messages)


def read_messages(raw: bytes) -> list[Message]:
    """Parse messages. Raises PromptRefusedError."""
    try:
        return _messages(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refusal(str(error)) from error
    except RecursionError as error:
        raise PromptRefusedError("messages", "Invalid value for 'messages': too deep.") from error


def _refusal(text: str) -> PromptRefusedError:
    """Convert a msgspec message to an error in OpenAI's words.

    The messages are «Expected X, got Y - at `$[0].role`» or «Object missing required field `f`».
    """
    reason, _, place = text.partition(" - at `$")
    field = f"messages{place.removesuffix('`')}"
    expected, _, got = reason.removeprefix("Expected ").partition(", got ")
    if not got:
        name = reason.rpartition(" field ")[2].strip("`")
        return PromptRefusedError(field, f"Missing required parameter: '{field}.{name}'.")
    message = f"Invalid type for '{field}': expected {expected}, but got {got} instead."
    return PromptRefusedError(field, message.replace("`", ""))


def _check(chat: Chat) -> None:
    kwargs = chat.chat_template_kwargs or {}
    if not kwargs.keys().isdisjoint(_RESERVED):
        raise NotLocalError("chat_template_kwargs")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise NotLocalError("continue_final_message with add_generation_prompt")
    if chat.tools is not None and chat.tool_choice == "none":
        raise NotLocalError("tools that may not be called")  # engines differ here, also by setting


def _is_null(raw: Raw) -> bool:
    return bytes(raw) == b"null"
