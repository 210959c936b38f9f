"""Block hashes of token ids, byte for byte compatible with the field.

    tokens ──per block──▶ local block hash ──chained──▶ sequence hash
             XXH3-64                        XXH3-64
             seed = 1337 + LoRA + salt      seed = 1337

The local hash identifies the content of one block. The sequence hash identifies the block together
with everything before it, and is a block's only identity on the bus and in the index. Sources:
Dynamo's `compute_block_hash_for_seq` and `compute_seq_hash_for_block` (1.0.2 and 1.6.1).
"""

import struct
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from router.protocol.requests import BlockMmInfo
from router.protocol.values import U64_MAX, HashArray
from router.sequence.hashing._hash_kernel import block_hashes, chain_hashes, prompt_hashes

TokenArray: TypeAlias = npt.NDArray[np.uint32]

HASH_SEED = 1337

_U64_PAIR = struct.Struct("<QQ")
_TOKEN = np.dtype("<u4")


def token_array(token_ids: Sequence[int] | TokenArray) -> TokenArray:
    """Return token ids as an array of little-endian u32; such an array is returned as it is.

    Raises OverflowError for an id outside u32.
    """
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == _TOKEN:
        return token_ids
    return np.asarray(token_ids, _TOKEN)


def hash_seed(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """Return the seed of local hashes. An empty name or salt counts as none.

    The inner seeds differ (0 and 1), so that LoRA "x" and salt "x" give different blocks.
    """
    seed = HASH_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), 1)
    return seed & U64_MAX


def local_block_hash(tokens: TokenArray, seed: int) -> int:
    """Return the hash of the content of one block."""
    return xxh3_64_intdigest(tokens.tobytes(), seed)


def chain_hash(parent_sequence_hash: int | None, local_hash: int, seed: int = HASH_SEED) -> int:
    """Return the sequence hash of a block after its parent; for a first block, its local hash."""
    if parent_sequence_hash is None:
        return local_hash
    return xxh3_64_intdigest(_U64_PAIR.pack(parent_sequence_hash, local_hash), seed)


def local_block_hashes(
    tokens: TokenArray,
    block_size: int,
    *,
    seed: int = HASH_SEED,
    block_mm_infos: Sequence[BlockMmInfo | None] | None = None,
    eagle: bool = False,
) -> HashArray:
    """Return the local hashes of the full blocks of a prompt; a trailing incomplete block has none.

    With `eagle` a block is hashed over a window one token longer than the stride, so a prompt has
    (tokens − 1) // block_size hashes. `block_mm_infos` may be shorter than the blocks; the order of
    the objects within a block does not matter. O(tokens), without the GIL.
    """
    tokens = np.ascontiguousarray(tokens, dtype=np.uint32)
    window = block_size + eagle
    hashes = np.empty(max(len(tokens) - eagle, 0) // block_size, dtype=np.uint64)
    block_hashes(tokens, block_size, window, seed, hashes)
    for index, info in enumerate((block_mm_infos or ())[: len(hashes)]):
        if info is not None:
            start = index * block_size
            content = tokens[start : start + window].tobytes() + _mm_suffix(info)
            hashes[index] = xxh3_64_intdigest(content, seed)
    return hashes


def sequence_hashes(
    tokens: TokenArray, block_size: int, *, seed: int = HASH_SEED, eagle: bool = False
) -> HashArray:
    """Return the sequence hashes of a prompt without multimodal objects, in one kernel call."""
    hashes = np.empty(max(len(tokens) - eagle, 0) // block_size, np.uint64)
    prompt_hashes(np.ascontiguousarray(tokens), block_size, block_size + eagle, seed, hashes)
    return hashes


def chain(local_hashes: HashArray | Sequence[int]) -> HashArray:
    """Return the sequence hashes of a prompt, in prefix order. O(blocks), without the GIL."""
    sequence_hashes = np.empty(len(local_hashes), dtype=np.uint64)
    chain_hashes(np.ascontiguousarray(local_hashes, dtype=np.uint64), sequence_hashes)
    return sequence_hashes


def _mm_suffix(info: BlockMmInfo) -> bytes:
    hashes = sorted(mm_object.mm_hash for mm_object in info.mm_objects)
    return struct.pack(f"<{len(hashes)}Q", *hashes)
