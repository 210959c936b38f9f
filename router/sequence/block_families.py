"""Two ways in which the field names blocks, of which a request's LoRA and salt are part.

| family | block hash, seed    | sequence hash, seed | used by                               |
|--------|---------------------|---------------------|---------------------------------------|
| routed | 1337 + LoRA + salt  | 1337                | the bus, the index, our pools         |
| salted | salt hash           | salt hash           | Dynamo's block manager (`lib/tokens`) |
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.sequence.hashing import (
    HASH_SEED,
    chain_hash,
    hash_seed,
    local_block_hash,
    token_array,
)


class BlockNames(Struct, frozen=True):
    """What a full block is called in one family. A first block's two names are the same."""

    block_hash: int
    sequence_hash: int
    parent_sequence_hash: int | None


class BlockFamily(Struct, frozen=True):
    """One way to name blocks: the seeds of what is in a block and of the step from its parent."""

    block_seed: int
    chain_seed: int

    def names(self, tokens: Sequence[int], parent_sequence_hash: int | None) -> BlockNames:
        """Names of a full block after its parent. O(tokens)."""
        block_hash = local_block_hash(token_array(tokens), self.block_seed)
        sequence_hash = chain_hash(parent_sequence_hash, block_hash, self.chain_seed)
        return BlockNames(block_hash, sequence_hash, parent_sequence_hash)


class Families(Struct, frozen=True):
    """Both ways in which the blocks of one request are named."""

    routed: BlockFamily
    salted: BlockFamily


def request_families(lora_name: str | None = None, cache_salt: str | None = None) -> Families:
    """How the blocks of a request with this LoRA and salt are named."""
    return Families(
        BlockFamily(hash_seed(lora_name, cache_salt), HASH_SEED),
        salted_family(salt_hash(lora_name, cache_salt)),
    )


def salted_family(salt_hash: int) -> BlockFamily:
    """The names that Dynamo's block manager gives under a salt."""
    return BlockFamily(salt_hash, salt_hash)


def salt_hash(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """Dynamo's salt of a request: of compact JSON with those fields that are there, salt first."""
    said = {"salt": cache_salt, "lora_name": lora_name}
    present = {key: value for key, value in said.items() if value is not None}
    return xxh3_64_intdigest(msgspec.json.encode(present), 0)
