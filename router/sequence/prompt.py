"""A prompt on its way through a decision: hashed once per identity that asks about it."""

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from router.errors import InvalidFieldError
from router.protocol.requests import BlockMmInfo, PromptRequest
from router.protocol.values import U32_MAX, HashArray, Identity
from router.sequence.hashing import chain, hash_seed, local_block_hashes, token_array

MAX_PROMPT_TOKENS = 4_000_000
"""More than any model reads; every token beyond would only hold up other requests."""


class HashedPrompt(Struct, frozen=True):
    """A prompt as a rank with blocks of this size sees it."""

    sequence_hashes: HashArray
    hash_list: Sequence[int]
    isl_tokens: int
    block_size: int

    @property
    def own_blocks(self) -> int:
        """1 where the prompt ends in an incomplete block, which nobody can share."""
        return int(self.isl_tokens > len(self.hash_list) * self.block_size)

    def prefill_tokens(self, overlap_blocks: int) -> int:
        """Tokens left to compute behind so many cached blocks."""
        return max(self.isl_tokens - overlap_blocks * self.block_size, 0)

    def cached_blocks(self, overlap_blocks: int, *, eagle: bool = False) -> int:
        """Blocks the engine will reuse: it computes at least one token, with EAGLE one block more.

        Source: vLLM `max_cache_hit_length = num_tokens − 1`, `drop_eagle_block`.
        """
        reusable = min(overlap_blocks, max(self.isl_tokens - 1, 0) // self.block_size)
        return max(reusable - eagle, 0)


class Prompt:
    """Tokens of a request, and their hashes for every identity asked about so far."""

    __slots__ = ("_by_identity", "_mm_infos", "_seed", "_tokens")

    def __init__(self, request: PromptRequest) -> None:
        self._tokens = token_array(request.token_ids or ())
        self._seed = hash_seed(request.lora_name, request.cache_salt)
        self._mm_infos: Sequence[BlockMmInfo | None] = request.block_mm_infos or ()
        self._by_identity: dict[Identity, HashedPrompt] = {}

    @classmethod
    def of_hashes(
        cls, sequence_hashes: Sequence[int], isl_tokens: int, identity: Identity
    ) -> "Prompt":
        """A prompt of which only the names of its full blocks are known, under one identity."""
        prompt = cls(PromptRequest())
        prompt._by_identity[identity] = HashedPrompt(
            np.array(sequence_hashes, np.uint64),
            list(sequence_hashes),
            isl_tokens,
            identity.block_size,
        )
        return prompt

    @property
    def isl_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._tokens)

    def hashed(self, identity: Identity) -> HashedPrompt:
        """The prompt under this identity. O(tokens) once, then O(1)."""
        known = self._by_identity.get(identity)
        if known is None:
            known = self._by_identity[identity] = self._hash(identity)
        return known

    def _hash(self, identity: Identity) -> HashedPrompt:
        hashes = chain(
            local_block_hashes(
                self._tokens,
                identity.block_size,
                seed=self._seed,
                block_mm_infos=self._mm_infos,
                eagle=identity.eagle,
            )
        )
        return HashedPrompt(hashes, hashes.tolist(), self.isl_tokens, identity.block_size)


def prepare(request: PromptRequest, identities: Iterable[Identity]) -> Prompt:
    """Hash a prompt under these identities; pure, so it may run on another thread. O(tokens).

    Raises InvalidFieldError where there are no tokens, or too many.
    """
    if request.token_ids is None:
        allowed = f"a list of integers, 0 to {U32_MAX}"
        raise InvalidFieldError(request.tokens_field, "missing", allowed)
    if len(request.token_ids) > MAX_PROMPT_TOKENS:
        length = f"{len(request.token_ids)} tokens"
        allowed = f"at most {MAX_PROMPT_TOKENS}"
        raise InvalidFieldError(request.tokens_field, length, allowed, status=413)
    prompt = Prompt(request)
    for identity in identities:
        prompt.hashed(identity)
    return prompt
