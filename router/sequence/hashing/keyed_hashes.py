"""Public block hashes, and keyed ones where other processes can read them: bus, index, dumps.

    tokens ─▶ sequence hash ──no key──▶ the same
              (public: anyone can       ──a key──▶ SipHash-2-4 of it: without the fleet's secret
               compute it)                         it does not reveal which prompt it belongs to

A public hash becomes a bus name where it leaves the process that computed it: in the journal of an
agent (or of the router itself, if it reads an engine), and in a prompt that is looked up. Chains,
and the data that an agent keeps for itself, consist of public hashes.

Keyed block hashes in bookings, which do not reveal the prompts being served.

    sequence hash ──key file, key id; model, group, block size, EAGLE, LoRA, salt──▶ name

Caches are still searched by the sequence hashes. Source: Dynamo 1.4, `keyed-xxh3-v1`, where keys
are derived by BLAKE3 and seed the hash chain itself. Here a key is derived by BLAKE2b, which Python
provides, and the chain's results are hashed by SipHash-2-4. That suffices because only routers with
the same key have to agree on names; none are exchanged with Dynamo.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec
import numpy as np
from msgspec import Struct

from router.protocol.requests import PromptRequest
from router.protocol.values import KEYED_SCHEME, SCHEME, HashArray, Identity
from router.runtime.kernels._siphash import keyed_names
from router.runtime.kernels.hash_key import BlockKey

KEY_BYTES = 32


class TrackingKey(Struct, frozen=True):
    """A secret and its id."""

    secret: bytes
    key_id: str = ""

    def __repr__(self) -> str:
        return f"TrackingKey({self.key_id!r})"

    @property
    def scheme(self) -> str:
        """The scheme, with a fingerprint of the secret."""
        fingerprint = blake2b(self.key_id.encode(), digest_size=4, key=self.secret).hexdigest()
        return f"{KEYED_SCHEME}:{fingerprint}"

    def names(
        self, sequence_hashes: HashArray, request: PromptRequest, identity: Identity
    ) -> HashArray:
        """Return the names of a request's blocks in bookings. O(blocks)."""
        about = (request.model_name, request.routing_group, request.lora_name, request.cache_salt)
        low, high = _derived(self, identity, *about)
        names = np.empty(len(sequence_hashes), np.uint64)
        keyed_names(low, high, np.ascontiguousarray(sequence_hashes, np.uint64), names)
        return names


@lru_cache(maxsize=1024)
def _derived(key: TrackingKey, *about: object) -> tuple[int, int]:
    """Return the SipHash key derived for an identity and the fields of a request."""
    payload = msgspec.msgpack.encode((KEYED_SCHEME, key.key_id, about))
    digest = blake2b(payload, digest_size=16, key=key.secret, person=b"tracking names").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


class HashKeying(Struct, frozen=True):
    """The hash scheme of blocks. Two processes with equal schemes use the same names.

    `key`: None for public hashes; `tracking`: the key of names in bookings, if they differ.
    """

    key: BlockKey | None = None
    tracking: TrackingKey | None = None

    @property
    def scheme(self) -> str:
        """The scheme in identities. It contains the key's fingerprint, not the key."""
        return SCHEME if self.key is None else f"{SCHEME}+siphash-2-4:{self.key.fingerprint}"

    @property
    def booking_scheme(self) -> str:
        """The scheme of blocks in bookings. It contains fingerprints of keys, not the keys."""
        return self.scheme if self.tracking is None else self.tracking.scheme

    @property
    def is_plain(self) -> bool:
        """True if all blocks have their public hashes everywhere."""
        return self.key is None and self.tracking is None

    def names(self, sequence_hashes: HashArray) -> HashArray:
        """Return the bus names of public hashes; without a key, the same array.

        O(blocks), without the GIL.
        """
        if self.key is None or not len(sequence_hashes):
            return sequence_hashes
        names = np.empty(len(sequence_hashes), np.uint64)
        hashes = np.ascontiguousarray(sequence_hashes, np.uint64)
        keyed_names(self.key.low, self.key.high, hashes, names)
        return names

    def load_names(
        self, sequence_hashes: HashArray, request: PromptRequest, identity: Identity
    ) -> HashArray:
        """Return the names in bookings of a request's public hashes. O(blocks)."""
        if self.tracking is None:
            return self.names(sequence_hashes)
        return self.tracking.names(sequence_hashes, request, identity)

    def listed(self, sequence_hashes: Sequence[int]) -> Sequence[int] | HashArray:
        """Return the bus names of a list of public hashes."""
        if self.key is None:
            return sequence_hashes
        return self.names(np.array(sequence_hashes, np.uint64))

    def name(self, sequence_hash: int) -> int:
        """Return the bus name of one hash."""
        if self.key is None:
            return sequence_hash
        return int(self.names(np.array([sequence_hash], np.uint64))[0])

    def parent(self, sequence_hash: int | None) -> int | None:
        """Return the bus name of a parent's hash, or None for a first block."""
        return None if sequence_hash is None else self.name(sequence_hash)

    def heads(self, heads: HashArray) -> HashArray:
        """Return heads of paths (`held.path_heads`), with bus names of parents."""
        if self.key is None:
            return heads
        rows = heads.reshape(-1, 3).copy()
        rows[:, 1] = self.names(np.ascontiguousarray(rows[:, 1]))
        return rows.ravel()


PLAIN = HashKeying()
"""The scheme without keys: public hashes."""
