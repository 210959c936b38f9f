"""The variables of a chat template, and the rendered text of a chat: as in vLLM's server."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from router.forward.tokenizer.chats import Chat, Message
from router.forward.tokenizer.errors import NotLocalError, PromptRefusedError
from router.forward.tokenizer.template import ChatTemplate

_BILLING = "x-anthropic-billing-header"
"""The prefix of a line of system messages that vLLM removes."""


def rendered(chat: Chat, template: ChatTemplate, special_tokens: Mapping[str, str]) -> str:
    """Return the text of a chat. Raises PromptRefusedError, NotLocalError."""
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
        "tools": None if chat.tools is None else [tool.described() for tool in chat.tools],
        "documents": None,
        "add_generation_prompt": chat.add_generation_prompt,
    }
    messages = [_described(each, template.takes_parts) for each in chat.messages]
    if not template.knows_developer and any(each["role"] == "developer" for each in messages):
        messages = _without_developers(messages)
    return template.render(messages, variables, continues=chat.continue_final_message)


def _described(message: Message, takes_parts: bool) -> dict[str, Any]:
    """Return a message for a template. Raises NotLocalError."""
    texts = list(_texts(message))
    as_parts = takes_parts and message.role != "tool"
    content = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "assistant":
        if message.tool_calls:
            fields["tool_calls"] = [_call(each) for each in message.tool_calls]
        if message.reasoning is not None:
            fields["reasoning"] = fields["reasoning_content"] = message.reasoning
        elif message.reasoning_content is not None:
            raise NotLocalError("reasoning_content")  # some engines use it
    if message.role == "tool" and message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    fields |= {n: v for n in ("name", "task") if isinstance(v := getattr(message, n), str)}
    if message.role == "developer":
        fields["tools"] = message.tools
    return fields


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
    """Return a tool call with its arguments as an object. Raises PromptRefusedError."""
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
        except (RecursionError, ValueError) as error:  # too deep, or a number of many digits
            said = "Invalid value for 'messages': arguments of a tool call too deep or long."
            raise PromptRefusedError("messages", said) from error
    if not isinstance(arguments, dict):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _without_developers(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which developers' messages are part of the first, system message."""
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
