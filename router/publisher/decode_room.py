"""Memory for decoding a batch, whose size is known only afterwards."""

import numpy as np

from router.protocol.values import HashArray
from router.sequence.hashing import TokenArray

_KEPT_BYTES = 1 << 18


class DecodeRoom:
    """Room for a token and a hash for every byte of a batch, kept for the next one if it is small:
    in fresh memory every page costs a fault, a tenth of all that an event costs.
    """

    __slots__ = ("_hashes", "_tokens")

    def __init__(self) -> None:
        self._tokens: TokenArray = np.empty(0, np.uint32)
        self._hashes: HashArray = np.empty(0, np.uint64)

    def of(self, size_bytes: int) -> tuple[TokenArray, HashArray]:
        """Arrays that are good until the next call."""
        if size_bytes > _KEPT_BYTES:
            return np.empty(size_bytes, np.uint32), np.empty(size_bytes, np.uint64)
        if size_bytes > len(self._tokens):
            self._tokens, self._hashes = (
                np.empty(2 * size_bytes, np.uint32),
                np.empty(2 * size_bytes, np.uint64),
            )
        return self._tokens, self._hashes
