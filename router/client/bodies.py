"""Questions as bodies. Long prompts go over HTTP as they are: written ones in their JSON, others as
four bytes a token, and the rest as query parameters; the router reads either without an object a
token.
"""

import sys
from array import array
from typing import Any

import msgspec
from msgspec import Struct

from router.client.calls import Question
from router.client.written_tokens import WrittenTokens

BINARY_TOKENS = 64
"""Shorter prompts go as JSON: nothing would be won."""

_LITTLE_ENDIAN_U32 = "<u4"


class Body(Struct, frozen=True):
    """A body of a POST; parameters go into its query."""

    content: bytes
    media_type: str = "application/json"
    parameters: dict[str, str] = {}


def encoded(question: Question[Any]) -> Body:
    """A question's fields, for HTTP. Tokens that are none go as JSON: the router says what is wrong
    with them.
    """
    fields = question.fields
    if question.call.takes_binary:
        if question.header_id is None and question.request_id is not None:
            fields = {**fields, "request_id": question.request_id}
        elif "request_id" in fields:  # it is in a header: words that repeat are read once
            fields = {name: value for name, value in fields.items() if name != "request_id"}
        tokens = fields.get("token_ids", ())
        packed = None if isinstance(tokens, WrittenTokens) else _packed(tokens)
        if packed is not None:
            rest = {name: _text(value) for name, value in fields.items() if name != "token_ids"}
            return Body(packed, "application/octet-stream", rest)
    return Body(msgspec.json.encode(fields, enc_hook=_as_json))


def _as_json(value: Any) -> Any:
    return msgspec.Raw(value.written) if isinstance(value, WrittenTokens) else as_list(value)


def as_list(value: Any) -> Any:
    """Arrays of numpy and Python, for encoders. Raises NotImplementedError for all else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _packed(tokens: Any) -> bytes | None:
    """Tokens that are worth it, and are some."""
    if len(tokens) < BINARY_TOKENS:
        return None
    kind = getattr(getattr(tokens, "dtype", None), "kind", None)
    if kind is not None:
        is_fit = kind in "iu" and tokens.ndim == 1 and 0 <= tokens.min() <= tokens.max() < 1 << 32
        return tokens.astype(_LITTLE_ENDIAN_U32).tobytes() if is_fit else None
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError):
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
