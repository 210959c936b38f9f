"""A SipHash key for block names, derived from a secret of the fleet.

Its fingerprint distinguishes two secrets and reveals neither.
"""

from hashlib import blake2b

from msgspec import Struct


class BlockKey(Struct, frozen=True):
    """A SipHash key, as two little-endian u64, and the fingerprint of its secret."""

    low: int
    high: int
    fingerprint: str

    def __repr__(self) -> str:
        return f"BlockKey({self.fingerprint})"


def derive(secret: bytes, purpose: str = "blocks") -> BlockKey:
    """Derive the key for one purpose; keys of different purposes are independent."""
    key = blake2b(secret, digest_size=16, person=f"key {purpose}".encode()).digest()
    fingerprint = blake2b(secret, digest_size=4, person=f"id {purpose}".encode()).hexdigest()
    return BlockKey(
        int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"), fingerprint
    )
