"""A cache of the tokens of texts. It needs no tokenizer, as forwarders without one have it too."""

from array import array
from collections import OrderedDict
from hashlib import blake2b
from threading import Lock

OVERHEAD_TOKENS = 32
"""Tokens that an entry counts in addition to its own, for its key and table slot."""


class TokenCache:
    """An LRU cache of up to `most_tokens` tokens in all, 4 bytes each. Thread-safe."""

    __slots__ = ("_held_tokens", "_known", "_lock", "_most_tokens")

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._held_tokens = 0
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = Lock()

    @property
    def held_tokens(self) -> int:
        """The size of the cache in tokens, including the overhead of each entry."""
        return self._held_tokens

    def get(self, key: bytes) -> "array[int] | None":
        """Return cached tokens, which must not be changed, or None. Marks them as recently used."""
        with self._lock:
            tokens = self._known.get(key)
            if tokens is not None:
                self._known.move_to_end(key)
            return tokens

    def put(self, key: bytes, tokens: "array[int]") -> None:
        """Store tokens, and evict the least recently used ones beyond the limit."""
        with self._lock:
            before = self._known.pop(key, None)
            self._held_tokens -= _size(before) if before is not None else 0
            self._known[key] = tokens
            self._held_tokens += _size(tokens)
            while self._held_tokens > self._most_tokens:
                self._held_tokens -= _size(self._known.popitem(last=False)[1])


def partition_key(secret: bytes, partition: bytes) -> bytes:
    """Return the key under which a partition's texts are named; `secret` keys the empty one."""
    return blake2b(partition, digest_size=16, key=secret).digest() if partition else secret


def _size(tokens: "array[int]") -> int:
    return len(tokens) + OVERHEAD_TOKENS
