"""What a template is given of a chat, and the text it makes of it: as in vLLM's server."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from router.forward.tokenizer.chats import Chat, Message
from router.forward.tokenizer.errors import NotLocalError, PromptRefusedError
from router.forward.tokenizer.template import ChatTemplate

_BILLING = "x-anthropic-billing-header"
"""A line of system messages that vLLM takes out."""


def rendered(chat: Chat, template: ChatTemplate, special_tokens: Mapping[str, str]) -> str:
    """The text of a chat. Raises PromptRefusedError, NotLocalError."""
    reads = template.variables
    if chat.reasoning_effort is not None and reads & {"reasoning_effort", "enable_thinking"}:
        raise NotLocalError("reasoning_effort")
    own = {
        name: value
        for name, value in (chat.chat_template_kwargs or {}).items()
        if name in reads and value is not None and value != "auto"
    }
    variables = {
        **special_tokens,
        **own,
        "tools": None if chat.tools is None else [tool.told() for tool in chat.tools],
        "documents": None,
        "add_generation_prompt": chat.add_generation_prompt,
    }
    messages = [_told(each, template.takes_parts) for each in chat.messages]
    if not template.knows_developer and any(each["role"] == "developer" for each in messages):
        messages = _without_developers(messages)
    return template.render(messages, variables, continues=chat.continue_final_message)


def _told(message: Message, takes_parts: bool) -> dict[str, Any]:
    """What a template is told of a message. Raises NotLocalError."""
    texts = list(_texts(message))
    as_parts = takes_parts and message.role != "tool"
    content = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    told: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "assistant":
        if message.tool_calls:
            told["tool_calls"] = [_call(each) for each in message.tool_calls]
        if message.reasoning is not None:
            told["reasoning"] = told["reasoning_content"] = message.reasoning
        elif message.reasoning_content is not None:
            raise NotLocalError("reasoning_content")  # some engines read it
    if message.role == "tool" and message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    told |= {n: v for n in ("name", "task") if isinstance(v := getattr(message, n), str)}
    if message.role == "developer":
        told["tools"] = message.tools
    return told


def _texts(message: Message) -> Iterable[str]:
    content = message.content
    for part in [content] if isinstance(content, str) else content or ():
        text, kind = (part, "text") if isinstance(part, str) else (part.text, part.type)
        if kind != "text" or text is None:
            raise NotLocalError(f"a part of type {kind!r}")
        if message.role == "system" and text.startswith(_BILLING):
            raise NotLocalError("a line that engines take out")
        yield text


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool, its arguments as an object. Raises PromptRefusedError."""
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        said = "Invalid value for 'messages': tool_calls are of type 'function'."
        raise PromptRefusedError("messages", said)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _without_developers(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What developers say is said by the system, which speaks once, and first."""
    renamed = [
        {**each, "role": "system"} if each["role"] == "developer" else each for each in messages
    ]
    for each in renamed:
        if each["role"] == "system":
            each.pop("tools", None)
    said = [each for each in renamed if each["role"] == "system"]
    if said == renamed[:1]:
        return renamed
    texts = [text for each in said if (text := _as_text(each["content"]))]
    others = [each for each in renamed if each["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _as_text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
