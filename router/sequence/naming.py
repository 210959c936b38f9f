"""What blocks are called where others can look: on the bus, in the index, in dumps.

    tokens ─▶ sequence hash ──no key──▶ the same
              (public: anybody          ──a key──▶ SipHash-2-4 of it: nobody without the fleet's
               can compute it)                     secret can tell which prompt it names

A public hash becomes a bus name where it leaves whoever computed it: in the journal of an agent (or
of the router itself, that reads an engine), and in a prompt that is looked up. Chains, and what an
agent keeps for itself, are of public hashes.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from router.protocol.requests import PromptRequest
from router.protocol.values import SCHEME, HashArray, Identity
from router.security.block_keys import BlockKey
from router.sequence._siphash import keyed_names
from router.sequence.tracking_names import TrackingKey


class BlockNaming(Struct, frozen=True):
    """How blocks are named; two processes name them alike whose schemes are equal. `tracking`: how
    they are named in bookings, where that is otherwise.
    """

    key: BlockKey | None = None
    tracking: TrackingKey | None = None

    @property
    def scheme(self) -> str:
        """Of identities: it tells the key's fingerprint, and nothing of the key."""
        return SCHEME if self.key is None else f"{SCHEME}+siphash-2-4:{self.key.fingerprint}"

    @property
    def is_plain(self) -> bool:
        """Whether blocks are called by their public hashes everywhere."""
        return self.key is None and self.tracking is None

    def names(self, sequence_hashes: HashArray) -> HashArray:
        """Bus names of public hashes; without a key the same array. O(blocks), without the GIL."""
        if self.key is None or not len(sequence_hashes):
            return sequence_hashes
        names = np.empty(len(sequence_hashes), np.uint64)
        hashes = np.ascontiguousarray(sequence_hashes, np.uint64)
        keyed_names(self.key.low, self.key.high, hashes, names)
        return names

    def load_names(
        self, sequence_hashes: HashArray, request: PromptRequest, identity: Identity
    ) -> HashArray:
        """Names in bookings of a request's public hashes. O(blocks)."""
        if self.tracking is None:
            return self.names(sequence_hashes)
        return self.tracking.names(sequence_hashes, request, identity)

    def listed(self, sequence_hashes: Sequence[int]) -> Sequence[int] | HashArray:
        """The same of a list."""
        if self.key is None:
            return sequence_hashes
        return self.names(np.array(sequence_hashes, np.uint64))

    def name(self, sequence_hash: int) -> int:
        """The bus name of one hash."""
        if self.key is None:
            return sequence_hash
        return int(self.names(np.array([sequence_hash], np.uint64))[0])

    def parent(self, sequence_hash: int | None) -> int | None:
        """The same of a block that may have none before it."""
        return None if sequence_hash is None else self.name(sequence_hash)

    def heads(self, heads: HashArray) -> HashArray:
        """Heads of paths (`held.path_heads`), with bus names of parents."""
        if self.key is None:
            return heads
        rows = heads.reshape(-1, 3).copy()
        rows[:, 1] = self.names(np.ascontiguousarray(rows[:, 1]))
        return rows.ravel()


PLAIN = BlockNaming()
"""Public hashes as they are."""
