"""A prompt on its way through a decision: hashed once per identity that asks about it."""

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from router.errors import InvalidFieldError
from router.protocol.requests import BlockMmInfo, PromptRequest
from router.protocol.values import U32_MAX, U64_MAX, HashArray, Identity
from router.sequence.footprint import Footprint, reusable_blocks
from router.sequence.hashing import chain, hash_seed, local_block_hashes, token_array
from router.sequence.stages import BLOCK_HASHING, SEQUENCE_HASHING, Stages

MAX_PROMPT_TOKENS = 4_000_000
"""More than any model reads; every token beyond would only hold up other requests."""


class HashedPrompt(Struct, frozen=True):
    """A prompt as a rank with blocks of this size sees it."""

    sequence_hashes: HashArray
    isl_tokens: int
    block_size: int

    @property
    def own_blocks(self) -> int:
        """1 where the prompt ends in an incomplete block, which nobody can share."""
        return int(self.isl_tokens > len(self.sequence_hashes) * self.block_size)

    def footprint(
        self, overlap_blocks: int, expected_output_tokens: int | None = None
    ) -> Footprint:
        """What it weighs on a rank that has so many of its blocks cached."""
        return Footprint(
            self.sequence_hashes,
            self.own_blocks,
            self.isl_tokens,
            overlap_blocks * self.block_size,
            self.block_size,
            expected_output_tokens,
        )

    def prefill_tokens(self, overlap_blocks: int) -> int:
        """Tokens left to compute behind so many cached blocks."""
        return max(self.isl_tokens - overlap_blocks * self.block_size, 0)

    def cached_blocks(self, overlap_blocks: int, *, eagle: bool = False) -> int:
        """Blocks the engine will reuse of so many."""
        return reusable_blocks(self.isl_tokens, self.block_size, overlap_blocks, eagle=eagle)


class Prompt:
    """Tokens of a request, and their hashes for every identity asked about so far.

    Where only the hashes are known, they are those of every identity asked about. `stages`: where
    the decision about it is timed, if it is.
    """

    __slots__ = (
        "_by_identity",
        "_isl_tokens",
        "_known_hashes",
        "_mm_infos",
        "_seed",
        "_tokens",
        "stages",
    )

    def __init__(self, request: PromptRequest, stages: Stages | None = None) -> None:
        self.stages = stages
        self._tokens = token_array(() if request.token_ids is None else request.token_ids)
        self._isl_tokens = len(self._tokens)
        self._known_hashes: Sequence[int] | None = None
        if request.token_ids is None and request.sequence_hashes is not None:
            self._isl_tokens = request.isl_tokens or 0
            self._known_hashes = request.sequence_hashes
        self._seed = hash_seed(request.lora_name, request.cache_salt)
        self._mm_infos: Sequence[BlockMmInfo | None] = request.block_mm_infos or ()
        self._by_identity: dict[Identity, HashedPrompt] = {}

    @property
    def isl_tokens(self) -> int:
        """Length of the prompt."""
        return self._isl_tokens

    def hashed(self, identity: Identity) -> HashedPrompt:
        """The prompt under this identity. O(tokens) once, then O(1)."""
        known = self._by_identity.get(identity)
        if known is None:
            known = self._by_identity[identity] = self._hash(identity)
        return known

    def _hash(self, identity: Identity) -> HashedPrompt:
        if self._known_hashes is not None:
            known = np.array(self._known_hashes, np.uint64)
            return HashedPrompt(known, self.isl_tokens, identity.block_size)
        local_hashes = local_block_hashes(
            self._tokens,
            identity.block_size,
            seed=self._seed,
            block_mm_infos=self._mm_infos,
            eagle=identity.eagle,
        )
        self.end(BLOCK_HASHING)
        hashes = chain(local_hashes)
        self.end(SEQUENCE_HASHING)
        return HashedPrompt(hashes, self.isl_tokens, identity.block_size)

    def end(self, stage: int) -> None:
        """A stage of the decision about it ended."""
        if self.stages is not None:
            self.stages.end(stage)


def prepare(
    request: PromptRequest, identities: Iterable[Identity], stages: Stages | None = None
) -> Prompt:
    """Hash a prompt under these identities; pure, so it may run on another thread. O(tokens).

    Raises InvalidFieldError where there are no tokens, or too many, or hashes that are none.
    """
    if request.token_ids is not None:
        _check_length(request.tokens_field, len(request.token_ids))
    elif request.sequence_hashes is not None:
        _check_hashes(request.sequence_hashes, request.isl_tokens)
    else:
        allowed = f"a list of integers, 0 to {U32_MAX}; or sequence_hashes and isl_tokens"
        raise InvalidFieldError(request.tokens_field, "missing", allowed)
    prompt = Prompt(request, stages)
    for identity in identities:
        prompt.hashed(identity)
    return prompt


def _check_hashes(sequence_hashes: Sequence[int], isl_tokens: int | None) -> None:
    if isl_tokens is None:
        reason = "missing; sequence_hashes do not say it"
        raise InvalidFieldError("isl_tokens", reason, "the prompt's length in tokens")
    _check_length("isl_tokens", isl_tokens)
    _check_length("sequence_hashes", len(sequence_hashes))
    if max(sequence_hashes, default=0) > U64_MAX:
        raise InvalidFieldError("sequence_hashes", "too large", f"0 to {U64_MAX}", status=422)


def _check_length(field: str, length: int) -> None:
    if length > MAX_PROMPT_TOKENS:
        reason, allowed = f"{length} tokens", f"at most {MAX_PROMPT_TOKENS}"
        raise InvalidFieldError(field, reason, allowed, status=413)
