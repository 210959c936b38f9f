"""Bodies that are mostly tokens: these are read into an array, the rest of the body by msgspec.

Whatever is not plainly an array of tokens is left to msgspec altogether, so that what is taken and
what is refused, and how, is the same either way.
"""

from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from router.process.bodies import JsonReader
from router.process.fields import KnownFields
from router.protocol.requests import PromptRequest
from router.sequence._token_kernel import find_tokens

T = TypeVar("T", bound=PromptRequest)

TOKEN_BYTES = 4
_KEY = np.frombuffer(b"token_ids", np.uint8)
_NO_TOKENS_YET = b"[]"


class TokenBodyDecoder(Generic[T]):
    """Decodes JSON objects of one type. May be used by several threads at once."""

    def __init__(self, body_type: type[T]) -> None:
        self._decode = msgspec.json.Decoder(body_type).decode
        self._known = KnownFields(body_type)
        self._whole = JsonReader(body_type)

    def decode(self, body: bytes, unknown: list[str]) -> T:
        """A checked request, its tokens an array; fields that nobody knows are added to `unknown`.
        Raises MalformedBodyError, InvalidFieldError.
        """
        room = np.empty(len(body) // 2 + 1, np.uint32)
        span = np.empty(2, np.int64)
        count = find_tokens(np.frombuffer(body, np.uint8), _KEY, room, span)
        if count < 0:
            return self._whole.read_now(body, unknown)
        start, end = span.tolist()
        rest = body[:start] + _NO_TOKENS_YET + body[end:]
        try:
            request = self._decode(rest)
            unknown += self._known.unknown(rest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._whole.read_now(body, unknown)  # refused as the whole of it is
        return with_tokens(request, room[:count].copy())


def with_tokens(request: T, tokens: npt.NDArray[np.uint32]) -> T:
    """A request that nobody else has seen yet, with these tokens put into it."""
    msgspec.structs.force_setattr(request, "token_ids", tokens)
    return request
