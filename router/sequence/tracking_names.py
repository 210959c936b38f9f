"""What blocks of bookings are called where nobody shall tell which prompts are being served.

    sequence hash ──key file, key id; model, group, block size, EAGLE, LoRA, salt──▶ name

Caches are searched by the sequence hashes all the same. Source: Dynamo 1.4, `keyed-xxh3-v1`, whose
keys come from BLAKE3 and seed the chain itself. Here a key comes from BLAKE2b, which Python has,
and names what the chain gives by SipHash-2-4: names have to be equal where prompts are, in routers
with one key, and Dynamo's are told none of ours.
"""

from functools import lru_cache
from hashlib import blake2b

import msgspec
import numpy as np
from msgspec import Struct

from router.protocol.requests import PromptRequest
from router.protocol.values import HashArray, Identity
from router.sequence._siphash import keyed_names

ALGORITHM = "keyed-xxh3-v1"
KEY_BYTES = 32


class TrackingKey(Struct, frozen=True):
    """A secret, and which one it is."""

    secret: bytes
    key_id: str = ""

    def __repr__(self) -> str:
        return f"TrackingKey({self.key_id!r})"

    def names(
        self, sequence_hashes: HashArray, request: PromptRequest, identity: Identity
    ) -> HashArray:
        """Names of a request's blocks in bookings. O(blocks)."""
        about = (request.model_name, request.routing_group, request.lora_name, request.cache_salt)
        low, high = _derived(self, identity, *about)
        names = np.empty(len(sequence_hashes), np.uint64)
        keyed_names(low, high, np.ascontiguousarray(sequence_hashes, np.uint64), names)
        return names


@lru_cache(maxsize=1024)
def _derived(key: TrackingKey, *about: object) -> tuple[int, int]:
    """A key of SipHash for what is asked about."""
    said = msgspec.msgpack.encode((ALGORITHM, key.key_id, about))
    digest = blake2b(said, digest_size=16, key=key.secret, person=b"tracking names").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
