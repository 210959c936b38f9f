"""Any request with messages or items as the chat that its engine tokenizes."""

from typing import Any

import msgspec

from router.errors import KvRouterError
from router.forward.apis.api import CHAT, MESSAGES, RESPONSES
from router.forward.apis.chats.chat_form import ChatForm, NoChatError, is_set
from router.forward.apis.chats.dialect import BILLING, Dialect
from router.forward.apis.chats.messages_as_chat import messages_as_chat
from router.forward.apis.chats.responses_as_chat import responses_as_chat
from router.forward.request_body import CompletionRequest, read_completion_request
from router.protocol.values import UNREADABLE, number_in

_MOST_KEPT = 1 << 30
_OF_ENGINES_ALONE = ("documents", "chat_template", "mm_processor_kwargs")
_MEDIA = (b'"image_url"', b'"input_audio"', b'"audio_url"', b'"video_url"', b'"image_embeds"',
          b'"image_pil"')  # fmt: skip

_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode
_kwargs = msgspec.json.Decoder(dict[str, Any] | None).decode
_text = msgspec.json.Decoder(str).decode


def as_chat(asked: CompletionRequest, dialect: Dialect) -> ChatForm:
    """Return a request as a chat.

    Raises NoChatError for a request that engines refuse, or that only they can tokenize.
    """
    try:
        if asked.path == MESSAGES:
            return messages_as_chat(asked, dialect)
        if asked.path == RESPONSES:
            return responses_as_chat(asked, dialect)
        return _plain(asked, dialect)
    except (*UNREADABLE, KvRouterError) as error:
        raise NoChatError(str(error)) from error


def _plain(asked: CompletionRequest, dialect: Dialect) -> ChatForm:
    """Return a chat with the names that its engine reads where it tokenizes chats."""
    assert asked.path == CHAT
    fields: dict[str, Any] = dict(asked.fields)
    features = _features(asked)
    if dialect.maps_effort:
        _map_effort(fields)
        raw = bytes(asked.fields["messages"])
        if b"reasoning_content" in raw or BILLING.encode() in raw:
            fields["messages"] = [_mapped(each, dialect) for each in _messages(raw)]
    keeps = fields.pop("truncate_prompt_tokens", None)
    kept = None if not is_set(keeps) else number_in(bytes(keeps).decode(), _MOST_KEPT)
    if is_set(keeps) and not kept:
        features.add("truncated")
    if "tools_not_to_be_called" in features:
        del fields["tool_choice"]
    chat = asked
    if fields.keys() != asked.fields.keys() or any(
        value is not asked.fields[name] for name, value in fields.items()
    ):
        chat = read_completion_request(CHAT, msgspec.json.encode(fields))
    is_proven = not features - {"media"}
    return ChatForm(chat, frozenset(features), is_proven, kept or None)


def _features(asked: CompletionRequest) -> set[str]:
    """Return the features of a chat of which its engine may make another prompt than tokenized."""
    fields = asked.fields
    features = {name for name in _OF_ENGINES_ALONE if is_set(fields.get(name))}
    if is_set(fields.get("tools")) and bytes(fields.get("tool_choice", b"")) == b'"none"':
        features.add("tools_not_to_be_called")
    raw = bytes(fields["messages"])
    if any(each in raw for each in _MEDIA):
        features.add("media")
    return features


def _map_effort(fields: dict[str, Any]) -> None:
    raw = fields.pop("reasoning_effort", None)
    if not is_set(raw):
        return
    effort = _text(raw)
    given = _kwargs(fields.get("chat_template_kwargs", b"null")) or {}
    mapped = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    fields["chat_template_kwargs"] = {**mapped, **given}


def _mapped(message: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    said = dict(message)
    if "reasoning_content" in said:
        thoughts = said.pop("reasoning_content")
        if said.get("reasoning") is None:
            said["reasoning"] = thoughts
    content = said.get("content")
    is_dropped = said.get("role") == "system" and dialect.billing == "dropped"
    if is_dropped and isinstance(content, str) and content.startswith(BILLING):
        said["content"] = content.partition("\n")[2]
    return said
