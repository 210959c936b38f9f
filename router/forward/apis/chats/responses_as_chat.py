"""Requests of OpenAI's Responses as chats, as vLLM makes them."""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.forward.apis.chats.chat_form import (
    ChatForm,
    NoChatError,
    call,
    chat_form,
    is_set,
    tool,
)
from router.forward.apis.chats.dialect import Dialect
from router.forward.request_body import ABSENT, CompletionRequest

_PROVEN = frozenset(("instructions", "items", "developer", "tools", "reasoning_and_call", "effort"))
"""Features whose chats vLLM 0.32 was seen to make."""

_ONLY_AT_ENGINES = ("previous_response_id", "previous_input_messages", "prompt")


class _Part(Struct, frozen=True):
    type: str = ""
    text: str | None = None
    image_url: str | None = None


class _Item(Struct, frozen=True):
    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[_Part] | None = None


class _Tool(Struct, frozen=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class _Reasoning(Struct, frozen=True):
    effort: str | None = None


class _Request(Struct, frozen=True):
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    reasoning: _Reasoning | None = None
    truncation: str | None = None


_read = msgspec.json.Decoder(_Request).decode
_NAMES = _Request.__struct_fields__


def responses_as_chat(asked: CompletionRequest, dialect: Dialect) -> ChatForm:
    """Return a request of Responses as a chat. Raises NoChatError, and msgspec's errors."""
    for name in _ONLY_AT_ENGINES:
        if is_set(asked.fields.get(name)):
            raise NoChatError(name)
    if dialect.name != "vllm":
        raise NoChatError("what this engine makes of Responses")
    given = {name: asked.fields[name] for name in _NAMES if name in asked.fields}
    return _Conversion(_read(msgspec.json.encode(given)), dialect).chat(asked)


class _Conversion:
    """One conversion. `features`: those that were met."""

    __slots__ = ("_dialect", "_request", "features", "messages")

    def __init__(self, request: _Request, dialect: Dialect) -> None:
        self._request = request
        self._dialect = dialect
        self.features: set[str] = set()
        self.messages: list[dict[str, Any]] = []

    def chat(self, asked: CompletionRequest) -> ChatForm:
        request = self._request
        if request.instructions is not None:
            self.features.add("instructions")
            self.messages.append({"role": "system", "content": request.instructions})
        if isinstance(request.input, str):
            self.messages.append({"role": "user", "content": request.input})
        else:
            self.features.add("items")
            for item in request.input:
                self._add(item)
        effort = None if request.reasoning is None else request.reasoning.effort
        if effort is not None:
            self.features.add("effort")
        if request.truncation not in (None, "disabled"):
            self.features.add("truncation")
        tools = None if not request.tools else [self._tool(each) for each in request.tools]
        return chat_form(
            asked,
            self._dialect,
            self.messages,
            self.features,
            tools=tools,
            effort=effort,
            proven=_PROVEN,
        )

    def _tool(self, given: _Tool) -> dict[str, Any]:
        if given.type != "function":
            raise NoChatError(f"a tool of type {given.type[:64]!r}")
        self.features.add("tools")
        more = {} if given.strict is None else {"strict": given.strict}
        parameters = None if given.parameters == ABSENT else given.parameters
        return tool(given.name, given.description, parameters, **more)

    def _add(self, item: _Item) -> None:
        match item.type:
            case "message" if item.role is not None:
                if item.role != "user":
                    self.features.add(item.role[:16])
                self.messages.append({"role": item.role, "content": self._content(item.content)})
            case "reasoning":
                self.features.add("reasoning")
                thoughts = self._text(item.content)
                self.messages.append({"role": "assistant", "reasoning": thoughts})
            case "function_call":
                self._add_call(item)
            case "function_call_output":
                said = self._text(item.output)
                about = {"role": "tool", "tool_call_id": item.call_id or ""}
                self.messages.append({**about, "content": said})
            case _:
                raise NoChatError(f"an item of type {item.type[:64]!r}")

    def _add_call(self, item: _Item) -> None:
        """Add a call: to the thoughts before it, or as a message of its own."""
        made = call(item.call_id or "", item.name or "", item.arguments or "")
        last = self.messages[-1] if self.messages else {}
        if last.keys() == {"role", "reasoning"}:
            self.features.discard("reasoning")
            self.features.add("reasoning_and_call")
            last["tool_calls"] = [made]
            return
        self.features.add("calls" if last.get("role") == "assistant" else "call")
        self.messages.append({"role": "assistant", "tool_calls": [made]})

    def _content(self, content: str | list[_Part] | None) -> Any:
        if content is None or isinstance(content, str):
            return content
        parts: list[dict[str, Any]] = []
        for part in content:
            if part.type in ("input_text", "output_text", "text") and part.text is not None:
                parts.append({"type": "text", "text": part.text})
            elif part.type == "input_image" and part.image_url is not None:
                self.features.add("media")
                parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
            else:
                raise NoChatError(f"a part of type {part.type[:64]!r}")
        return parts

    def _text(self, content: str | list[_Part] | None) -> str:
        if content is None or isinstance(content, str):
            return content or ""
        if len(content) > 1:
            self.features.add("several_texts")
        if any(part.text is None for part in content):
            raise NoChatError("a part that is no text")
        return "".join(part.text or "" for part in content)
