"""Requests of Anthropic's Messages as chats, by the rules of their engine."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.forward.apis.chats.chat_form import ChatForm, NoChatError, call, chat_form, tool
from router.forward.apis.chats.dialect import BILLING, Dialect
from router.forward.request_body import ABSENT, CompletionRequest

_PROVEN = frozenset(
    ("system", "blocks", "billing", "tools", "thinking_disabled", "thinking", "tool_use",
     "tool_result", "inline_system")
)  # fmt: skip
"""Features whose chats vLLM 0.32 was seen to make."""


class _Source(Struct, frozen=True):
    type: str = ""
    media_type: str = ""
    data: str = ""
    url: str = ""

    @property
    def as_url(self) -> str:
        return self.url if self.type == "url" else f"data:{self.media_type};base64,{self.data}"


class _Block(Struct, frozen=True):
    type: str = ""
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = ABSENT
    tool_use_id: str | None = None
    content: "str | list[_Block] | None" = None
    thinking: str | None = None
    source: _Source | None = None


class _Message(Struct, frozen=True):
    role: str
    content: str | list[_Block]


class _Tool(Struct, frozen=True):
    name: str
    description: str | None = None
    input_schema: Raw = ABSENT


class _Thinking(Struct, frozen=True):
    type: str = ""


class _OutputConfig(Struct, frozen=True):
    effort: str | None = None


class _Request(Struct, frozen=True):
    messages: list[_Message]
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None


_read = msgspec.json.Decoder(_Request).decode
_schema = msgspec.json.Decoder(dict[str, Raw]).decode
_NAMES = _Request.__struct_fields__


def messages_as_chat(asked: CompletionRequest, dialect: Dialect) -> ChatForm:
    """Return a request of Messages as a chat. Raises NoChatError, and msgspec's errors."""
    given = {name: asked.fields[name] for name in _NAMES if name in asked.fields}
    request = _read(msgspec.json.encode(given))
    return _Conversion(request, dialect).chat(asked)


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
        self._add_system()
        for message in request.messages:
            self._add(message)
        tools = None if not request.tools else [self._tool(each) for each in request.tools]
        return chat_form(
            asked,
            self._dialect,
            self.messages,
            self.features,
            tools=tools,
            effort=self._effort(),
            proven=_PROVEN,
        )

    def _effort(self) -> str | None:
        request = self._request
        if request.thinking is not None and request.thinking.type == "disabled":
            self.features.add("thinking_disabled")
            return "none" if self._dialect.thinking_disabled == "effort_none" else None
        if request.thinking is not None:
            self.features.add(f"thinking_{request.thinking.type[:16]}")
        effort = None if request.output_config is None else request.output_config.effort
        if effort is not None:
            self.features.add("effort")
        return effort if self._dialect.maps_effort else None

    def _add_system(self) -> None:
        system = self._request.system
        if not system:
            return
        self.features.add("system")
        if isinstance(system, str):
            texts = [system]
        else:
            self.features.add("blocks")
            texts = [each.text for each in system if each.type == "text" and each.text]
        kept = list(self._without_billing(texts))
        if not kept:
            self.features.add("empty_system")
        content = self._dialect.system_joint.join(kept)
        self.messages.append({"role": "system", "content": content})

    def _without_billing(self, texts: list[str]) -> Iterator[str]:
        billing = self._dialect.billing
        for number, text in enumerate(texts):
            if not text.startswith(BILLING):
                yield text
                continue
            self.features.add("billing")
            if billing == "kept" or (billing == "first_dropped" and number):
                yield text

    def _tool(self, given: _Tool) -> dict[str, Any]:
        """Return a tool as a chat has it; the client's order of its schema's keys is kept."""
        if given.input_schema == ABSENT:
            raise NoChatError("a tool of the server")
        self.features.add("tools")
        schema: dict[str, Any] = _schema(given.input_schema)
        if "type" not in schema:
            schema["type"] = "object"
        description = given.description
        if description is None:
            description = self._dialect.description
        return tool(given.name, description, schema)

    def _add(self, message: _Message) -> None:
        if message.role == "system":
            self.features.add("inline_system")
        if isinstance(message.content, str):
            self.messages.append({"role": message.role, "content": message.content})
            return
        said: dict[str, Any] = {"role": message.role}
        parts = list(self._parts(message))
        calls = [
            call(each.id or "", each.name or "", bytes(each.input).decode() or "{}")
            for each in message.content
            if each.type == "tool_use"
        ]
        thoughts = [each.thinking or "" for each in message.content if each.type == "thinking"]
        if thoughts:
            said["reasoning"] = self._joined(thoughts)
        if calls:
            self.features.add("tool_use" if len(calls) == 1 else "tool_uses")
            said["tool_calls"] = calls
        if len(parts) == 1 and parts[0]["type"] == "text":
            said["content"] = parts[0]["text"]
        elif parts:
            self.features.add("blocks")
            said["content"] = parts
        if len(said) > 1:
            self.messages.append(said)

    def _joined(self, thoughts: list[str]) -> str:
        self.features.add("thinking" if len(thoughts) == 1 else "thoughts")
        joint = self._dialect.thinking_joint
        if joint is None:
            raise NoChatError("thinking in the history")
        return joint.join(thoughts)

    def _parts(self, message: _Message) -> Iterator[dict[str, Any]]:
        """Yield the parts of a message; results of tools become messages before it."""
        assert not isinstance(message.content, str)
        for block in message.content:
            match block.type:
                case "text":
                    if block.text:
                        yield {"type": "text", "text": block.text}
                case "image" if block.source is not None:
                    self.features.add("media")
                    yield {"type": "image_url", "image_url": {"url": block.source.as_url}}
                case "tool_result" if message.role == "user":
                    self._add_result(block)
                case "thinking" | "tool_use":
                    pass
                case "redacted_thinking" if self._dialect.name == "vllm":
                    self.features.add("redacted_thinking")
                case _:
                    raise NoChatError(f"a block of type {block.type[:64]!r}")

    def _add_result(self, block: _Block) -> None:
        self.features.add("tool_result")
        content = block.content or ""
        if not isinstance(content, str):
            if any(each.type != "text" or each.text is None for each in content):
                raise NoChatError("a tool's result that is no text")
            content = "\n".join(each.text or "" for each in content)
        self.messages.append(
            {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content}
        )
