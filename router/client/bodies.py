"""Requests as HTTP bodies.

Long prompts are sent in compact form: `EncodedTokens` as their JSON, others as four bytes a token,
with the remaining fields as query parameters. The router reads both without an object per token.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec
from msgspec import Struct

from router.client.calls import Question
from router.errors import InvalidFieldError
from router.protocol.values import UNREADABLE, TokenId

_read = msgspec.json.Decoder(list[TokenId]).decode


class EncodedTokens(Sequence[int]):
    """A prompt as a JSON array, which is parsed when it is first read.

    Over HTTP the array is sent unchanged, because parsing a thousand numbers takes longer than
    everything else that is done for a request.

    Raises InvalidFieldError if it is read and contains no tokens; if unread, the router reports
    that.
    """

    __slots__ = ("_field", "_tokens", "written")

    def __init__(self, written: bytes | msgspec.Raw, field: str = "token_ids") -> None:
        """Wrap `written`, a JSON array of anything. `field`: its name in errors."""
        self.written = written
        self._field = field
        self._tokens: list[int] | None = None

    def tolist(self) -> list[int]:
        """Return the tokens, which must not be modified."""
        if self._tokens is None:
            try:
                self._tokens = _read(self.written)
            except UNREADABLE as error:
                reason, allowed = str(error), "token ids"
                raise InvalidFieldError(self._field, reason, allowed, status=422) from error
        return self._tokens

    def __len__(self) -> int:
        return len(self.tolist())

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self.tolist()[at]


BINARY_TOKENS = 64
"""The shortest prompt that is sent in binary form; JSON is as fast for shorter ones."""

_LITTLE_ENDIAN_U32 = "<u4"


NO_FIELDS = b"{}"
"""The content of a request without fields."""


class Body(Struct, frozen=True):
    """The body of a POST. `parameters` go into the URL's query."""

    content: bytes
    media_type: str = "application/json"
    parameters: dict[str, str] = {}


def encoded(question: Question[Any]) -> Body:
    """Return a request's fields as an HTTP body.

    Invalid tokens are sent as JSON, so that the router responds with what is wrong with them.
    """
    fields = question.fields
    if question.call.takes_binary:
        if question.header_id is None and question.request_id is not None:
            fields = {**fields, "request_id": question.request_id}
        elif "request_id" in fields:  # it is in a header: equal bodies are parsed once
            fields = {name: value for name, value in fields.items() if name != "request_id"}
        tokens = fields.get("token_ids", ())
        packed = None if isinstance(tokens, EncodedTokens) else packed_tokens(tokens)
        if packed is not None:
            rest = {name: _text(value) for name, value in fields.items() if name != "token_ids"}
            return Body(packed, "application/octet-stream", rest)
    return Body(as_json(fields))


def as_json(fields: dict[str, Any]) -> bytes:
    """Return fields as JSON."""
    return msgspec.json.encode(fields, enc_hook=_written)


def _written(value: Any) -> Any:
    return msgspec.Raw(value.written) if isinstance(value, EncodedTokens) else as_list(value)


def as_list(value: Any) -> Any:
    """Return an array of numpy or Python as a list. Raises NotImplementedError for other types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def packed_tokens(tokens: Any) -> bytes | None:
    """Return tokens in binary form, or None if they are few or invalid."""
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
