"""Tokens of pieces of texts, each piece once, whichever conversation it is of."""

from array import array
from collections import OrderedDict
from threading import Lock

OVERHEAD_TOKENS = 32
"""That an entry counts for besides its own: its key, and its place in a table."""


class KnownPieces:
    """Up to so many tokens in all, 4 bytes each; what was not used for longest leaves. May be used
    by several threads at once.
    """

    __slots__ = ("_held_tokens", "_known", "_lock", "_most_tokens")

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._held_tokens = 0
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = Lock()

    @property
    def held_tokens(self) -> int:
        """With what each entry counts for besides."""
        return self._held_tokens

    def get(self, key: bytes) -> "array[int] | None":
        """What is known; it is then the newest. Not to be changed."""
        with self._lock:
            tokens = self._known.get(key)
            if tokens is not None:
                self._known.move_to_end(key)
            return tokens

    def put(self, key: bytes, tokens: "array[int]") -> None:
        """Keep these."""
        with self._lock:
            before = self._known.pop(key, None)
            self._held_tokens -= _size(before) if before is not None else 0
            self._known[key] = tokens
            self._held_tokens += _size(tokens)
            while self._held_tokens > self._most_tokens:
                self._held_tokens -= _size(self._known.popitem(last=False)[1])


def _size(tokens: "array[int]") -> int:
    return len(tokens) + OVERHEAD_TOKENS
