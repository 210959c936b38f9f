"""Names that clients give to images, kept apart by tenant.

Engines take a part's `uuid` for the hash of its content, so two tenants with one name would read
each other's images out of the cache.
"""

from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import structs

from router.errors import InvalidFieldError
from router.forward.apis.api import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES
from router.forward.request_body import CompletionRequest
from router.protocol.values import UNREADABLE

_NAME = "uuid"
_IN_JSON = b'"uuid"'
_WITH_PARTS = (CHAT, RESPONSES, MESSAGES, COUNT_TOKENS)


def with_own_names(asked: CompletionRequest, tenant: str | None) -> CompletionRequest:
    """Return a tenant's request with names of its own for its images.

    Raises InvalidFieldError for messages that are too deep.
    """
    if tenant is None or asked.path not in _WITH_PARTS:
        return asked
    field = "input" if asked.path == RESPONSES else "messages"
    raw = asked.fields[field]
    if _IN_JSON not in memoryview(raw).tobytes():
        return asked
    try:
        named = _renamed(msgspec.json.decode(raw), tenant)
        written = msgspec.Raw(msgspec.json.encode(named))
    except UNREADABLE as error:
        raise InvalidFieldError(field, str(error), "messages that can be read") from error
    return structs.replace(asked, fields={**asked.fields, field: written})


def _renamed(messages: Any, tenant: str) -> Any:
    """Return messages or items whose parts have other names; the text of parts is unchanged."""
    if not isinstance(messages, list):
        return messages
    return [_with_parts(each, tenant) if isinstance(each, dict) else each for each in messages]


def _with_parts(message: dict[str, Any], tenant: str) -> dict[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return {**message, "content": [_named(part, tenant) for part in parts]}


def _named(part: Any, tenant: str) -> Any:
    if not isinstance(part, dict) or not isinstance(part.get(_NAME), str):
        return part
    name = msgspec.msgpack.encode((tenant, part[_NAME]))
    return {**part, _NAME: blake2b(name, digest_size=32).hexdigest()}
