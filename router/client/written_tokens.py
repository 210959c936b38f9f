"""Tokens as somebody wrote them."""

from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from router.errors import InvalidFieldError
from router.protocol.values import TokenId

_read = msgspec.json.Decoder(list[TokenId]).decode


class WrittenTokens(Sequence[int]):
    """A prompt as a JSON array. Over HTTP it goes on as it is: reading a thousand numbers takes
    longer than all else that is done for a request. Whoever wants to see them reads them, once.

    Raises InvalidFieldError where they are read and are no tokens; unread, the router says so.
    """

    __slots__ = ("_field", "_tokens", "written")

    def __init__(self, written: bytes | msgspec.Raw, field: str = "token_ids") -> None:
        """`written`: an array in JSON, of anything. `field`: what errors call it."""
        self.written = written
        self._field = field
        self._tokens: list[int] | None = None

    def tolist(self) -> list[int]:
        """The tokens; not to be changed."""
        if self._tokens is None:
            try:
                self._tokens = _read(self.written)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
