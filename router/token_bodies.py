"""Bodies that are mostly tokens: these are read into an array, the rest of the body by msgspec.

Whatever is not plainly an array of tokens is left to msgspec altogether, so that what is taken and
what is refused, and how, is the same either way.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from router.process.bodies import JsonReader
from router.process.fields import KnownFields, check_names
from router.protocol.requests import PromptRequest
from router.sequence._token_kernel import find_tokens

T = TypeVar("T", bound=PromptRequest)

TOKEN_BYTES = 4
_NO_TOKENS_YET = b"[]"

MOST_REMEMBERED, MOST_BYTES = 256, 1024
"""Requests without their tokens that are remembered, and how long what says them may be."""


class TokenBodyDecoder(Generic[T]):
    """Decodes JSON objects of one type; `rest`: those that came, without their tokens. May be used
    by several threads at once.
    """

    def __init__(self, body_type: type[T]) -> None:
        self.rest = Remembered(self._read_rest)
        self._decode = msgspec.json.Decoder(body_type).decode
        self._known = KnownFields(body_type)
        self._whole = JsonReader(body_type)

    def split(
        self, body: bytes, room: npt.NDArray[np.uint32]
    ) -> tuple[bytes, npt.NDArray[np.uint32]] | None:
        """The body without its tokens, and these, in `room` for one every two bytes, and one more;
        None: they are not plainly an array.
        """
        count, start, end = find_tokens(np.frombuffer(body, np.uint8), room)
        if count < 0:
            return None
        return body[:start] + _NO_TOKENS_YET + body[end:], room[:count]

    def decode(self, body: bytes, unknown: list[str]) -> T:
        """A checked request, its tokens an array; fields that nobody knows are added to `unknown`.
        Raises MalformedBodyError, InvalidFieldError.
        """
        found = self.split(body, np.empty(len(body) // 2 + 1, np.uint32))
        if found is None:
            return self._whole.read_now(body, unknown)
        rest, tokens = found
        try:
            return self.rest.with_tokens(rest, tokens.copy(), unknown)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._whole.read_now(body, unknown)  # refused as the whole of it is

    def _read_rest(self, rest: bytes, unknown: list[str]) -> T:
        check_names(rest)
        request = self._decode(rest)
        unknown += self._known.unknown(rest)
        return request


class Remembered(Generic[T]):
    """Requests without their tokens: callers say the rest in the same words again and again.

    `read` makes a request of such words, and adds the fields that nobody knows to a list. May be
    used by several threads at once.
    """

    def __init__(self, read: Callable[[bytes, list[str]], T]) -> None:
        self._read = read
        self._known: dict[bytes, tuple[T, list[str]]] = {}

    def find(self, words: bytes) -> tuple[T, list[str]] | None:
        """What these words say, without tokens, and the fields in them that nobody knows; None:
        they are not remembered.
        """
        return self._known.get(words)

    def with_tokens(self, words: bytes, tokens: npt.NDArray[np.uint32], unknown: list[str]) -> T:
        """What these words say of a prompt of these tokens. Raises what `read` raises."""
        known = self._known.get(words)
        if known is None:
            known = self._first(words)
        without, fields = known
        if fields:
            unknown += fields
        request: T = without.__copy__()  # type: ignore[attr-defined]
        msgspec.structs.force_setattr(request, "token_ids", tokens)
        return request

    def _first(self, words: bytes) -> tuple[T, list[str]]:
        fields: list[str] = []
        known = (self._read(words, fields), fields)
        if len(words) <= MOST_BYTES:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            self._known[words] = known
        return known
