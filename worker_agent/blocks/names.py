"""Names of blocks, inside a pool and on the bus, and of the levels of the cache.

Names of blocks, inside a pool and on the bus.

`sequence_hash` is public: it names blocks on the bus, for routing, and collisions of its 64 bits
can be made on purpose. Pools therefore use `identity`: 128 bits under a secret of the deployment,
over everything that a block's bytes depend on. An attacker that makes a collision gets a wrong
route, but never the keys and values of another prompt.
"""

from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from itertools import pairwise
from struct import pack

from msgspec import Struct

from router.errors import InvalidFieldError
from router.protocol.values import U64_MAX, Tier
from router.sequence.hashing.tokens import TokenBlock


class CacheLevel(StrEnum):
    """A level of the cache, fastest first."""

    G1 = "G1"
    """Memory of the device."""
    G2 = "G2"
    """Memory of the host."""
    G3 = "G3"
    """Disk."""
    G4 = "G4"
    """A store that workers share."""

    @property
    def tier(self) -> Tier:
        """The tier, as messages on the bus name it."""
        return Tier(int(self[1]) - 1)


def level_of(tier: Tier) -> CacheLevel:
    """Return the level of a tier, as operators name it."""
    return CacheLevel(f"G{tier + 1}")


IDENTITY_BYTES = 16
SECRET_BYTES = range(16, 65)
UNPUBLISHED = U64_MAX
"""Public hash of a block that routers do not count: one of a sliding window."""


class BlockName(Struct, frozen=True, gc=False):
    """Both names of a full block, and those of the block before it."""

    identity: bytes
    sequence_hash: int
    parent_identity: bytes | None = None
    parent_sequence_hash: int | None = None

    @property
    def is_published(self) -> bool:
        """True if the block has a public name."""
        return self.sequence_hash != UNPUBLISHED


class Naming:
    """A naming of one model's blocks under one secret; immutable."""

    __slots__ = ("_model", "_secret")

    def __init__(self, secret: bytes, model: str) -> None:
        """Initialise from a secret and everything that is the same for all blocks.

        `model`: model, dtype, parallelism. Raises InvalidFieldError for a secret that is too short
        or too long.
        """
        if len(secret) not in SECRET_BYTES:
            raise InvalidFieldError("secret", f"{len(secret)} bytes", "16 to 64 bytes")
        self._secret = secret
        self._model = model.encode()

    def root(self, lora_name: str | None, cache_salt: str | None) -> bytes:
        """Return the identity from which the prompts of one LoRA adapter and salt begin."""
        parts = (self._model, (lora_name or "").encode(), (cache_salt or "").encode())
        return self._digest(b"".join(pack("<I", len(part)) + part for part in parts))

    def named(
        self, blocks: Sequence[TokenBlock], root: bytes, parent: BlockName | None = None
    ) -> list[BlockName]:
        """Name blocks that follow each other, the first of them after `parent`. O(tokens)."""
        names = [parent]
        for block in blocks:
            before = names[-1]
            above = root if before is None else before.identity
            content = above + pack(f"<{len(block.tokens)}I", *block.tokens)
            names.append(
                BlockName(
                    self._digest(content),
                    block.routed.sequence_hash,
                    None if before is None else before.identity,
                    block.routed.parent_sequence_hash,
                )
            )
        return [name for _, name in pairwise(names) if name is not None]

    def in_group(self, prefix: BlockName, tag: bytes) -> bytes:
        """Return the identity of the block of one KV cache group that ends where `prefix` does.

        `tag`: all that a block of the group depends on beside its prompt. Identities of different
        groups differ, and differ from those that `named` returns.
        """
        key, person = self._secret, b"kv cache group"
        content = prefix.identity + tag
        return blake2b(content, key=key, digest_size=IDENTITY_BYTES, person=person).digest()

    def _digest(self, content: bytes) -> bytes:
        return blake2b(content, key=self._secret, digest_size=IDENTITY_BYTES).digest()
