"""What a block is called, inside a pool and outside.

`sequence_hash` is public: it names blocks on the bus, for routing, and 64 bits can be made to
collide on purpose. So pools go by `identity`: 128 bits under a secret of the deployment, over
everything that a block's bytes depend on. Whoever crafts a collision gets a wrong route, and nobody
else's keys and values.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from struct import pack

from msgspec import Struct

from router.errors import InvalidFieldError
from router.sequence.tokens import TokenBlock

IDENTITY_BYTES = 16
SECRET_BYTES = range(16, 65)


class BlockName(Struct, frozen=True, gc=False):
    """Both names of a full block, and those of the block before it."""

    identity: bytes
    sequence_hash: int
    parent_identity: bytes | None = None
    parent_sequence_hash: int | None = None


class Naming:
    """Names blocks of one model under one secret; immutable."""

    __slots__ = ("_model", "_secret")

    def __init__(self, secret: bytes, model: str) -> None:
        """`model`: everything that is the same for all blocks: model, dtype, parallelism.

        Raises InvalidFieldError for a secret that is too short or too long.
        """
        if len(secret) not in SECRET_BYTES:
            raise InvalidFieldError("secret", f"{len(secret)} bytes", "16 to 64 bytes")
        self._secret = secret
        self._model = model.encode()

    def root(self, lora_name: str | None, cache_salt: str | None) -> bytes:
        """Where the prompts of one LoRA and salt begin."""
        parts = (self._model, (lora_name or "").encode(), (cache_salt or "").encode())
        return self._digest(b"".join(pack("<I", len(part)) + part for part in parts))

    def named(
        self, blocks: Sequence[TokenBlock], root: bytes, parent: BlockName | None = None
    ) -> list[BlockName]:
        """Names of blocks that follow each other, the first of them after `parent`. O(tokens)."""
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

    def _digest(self, content: bytes) -> bytes:
        return blake2b(content, key=self._secret, digest_size=IDENTITY_BYTES).digest()
