"""A prompt: the tokens of a request, or its caller's hashes, and its blocks for each identity."""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from router.errors import InvalidFieldError
from router.protocol.requests import BlockMmInfo, PromptRequest
from router.protocol.values import U32_MAX, U64_MAX, HashArray, Identity
from router.sequence.active.footprint import ExpectedUsage, Footprint, reusable_blocks
from router.sequence.active.stages import BLOCK_HASHING, SEQUENCE_HASHING, Stages
from router.sequence.hashing._hash_kernel import block_hashes, chain_hashes
from router.sequence.hashing.block_hashes import (
    HASH_SEED,
    TokenArray,
    chain,
    hash_seed,
    local_block_hashes,
    sequence_hashes,
)
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying

MAX_PROMPT_TOKENS = 4_000_000
"""The longest accepted prompt, which exceeds any model's context. More would delay other requests.
"""

NO_HASHES: HashArray = np.empty(0, np.uint64)
NO_TOKENS: TokenArray = np.empty(0, np.uint32)


def hash_array(field: str, hashes: Sequence[int]) -> HashArray:
    """Return hashes, signed or unsigned as callers send them, as u64. O(hashes).

    Raises InvalidFieldError if one does not fit into 64 bits.
    """
    # 40 ns a hash by `array`, for callers that send one kind; 120 ns by a loop in Python.
    for kind in "Qq":
        try:
            return np.array(array(kind, hashes)).view(np.uint64)
        except OverflowError:
            continue
    if max(hashes) > U64_MAX or min(hashes) < -(2**63):
        allowed = f"{-(2**63)} to {U64_MAX}"
        raise InvalidFieldError(field, "too large", allowed, status=422)
    return np.array([each & U64_MAX for each in hashes], np.uint64)


def full_blocks(isl_tokens: int, identity: Identity) -> int:
    """Return the number of blocks of a prompt that have a hash under this identity."""
    return max(isl_tokens - identity.eagle, 0) // identity.block_size


def check_length(field: str, length: int) -> None:
    """Raise InvalidFieldError if the prompt is longer than MAX_PROMPT_TOKENS."""
    if length > MAX_PROMPT_TOKENS:
        reason, allowed = f"{length} tokens", f"at most {MAX_PROMPT_TOKENS}"
        raise InvalidFieldError(field, reason, allowed, status=413)


def check_hashes(request: PromptRequest, identities: Sequence[Identity]) -> None:
    """Raise InvalidFieldError if a request's hashes are invalid or fit no identity's block size."""
    blocks, hashes, isl_tokens = request.block_hashes, request.sequence_hashes, request.isl_tokens
    if blocks is None and hashes is None:
        allowed = f"a list of integers, 0 to {U32_MAX}; or sequence_hashes and isl_tokens"
        raise InvalidFieldError(request.tokens_field, "missing", allowed)
    if hashes is None:
        allowed = "one for each of block_hashes; or token_ids instead of both"
        raise InvalidFieldError("sequence_hashes", "missing beside block_hashes", allowed)
    if isl_tokens is None:
        reason = "missing; sequence_hashes do not contain it"
        raise InvalidFieldError("isl_tokens", reason, "the prompt's length in tokens")
    check_length("isl_tokens", isl_tokens)
    check_length("sequence_hashes", len(hashes))
    if blocks is not None and len(blocks) != len(hashes):
        reason = f"{len(blocks)} beside {len(hashes)} sequence_hashes"
        raise InvalidFieldError("block_hashes", reason, "as many as sequence_hashes")
    _check_count(len(hashes), isl_tokens, identities)


def _check_count(blocks: int, isl_tokens: int, identities: Sequence[Identity]) -> None:
    """Raise InvalidFieldError if the number of hashes fits no identity's block size.

    Hashes of blocks of another size match nothing in the index, and would be booked as load.
    """
    fitting = {each: full_blocks(isl_tokens, each) for each in identities}
    if fitting and blocks not in fitting.values():
        sizes = sorted({each.block_size for each in identities})
        of_size = " or ".join(map(str, sizes))
        reason = f"{blocks} for {isl_tokens} tokens, where blocks have {of_size} tokens"
        allowed = " or ".join(map(str, sorted(set(fitting.values()))))
        raise InvalidFieldError("sequence_hashes", reason, allowed)


class HashedPrompt(Struct, frozen=True, gc=False):
    """A prompt as seen by a rank with blocks of this size.

    `sequence_hashes`: hashes of its full blocks in caches; `load_hashes`: those in bookings, which
    are the same unless the caller sends hashes of its own or bookings have a key. `public_hashes`:
    the unkeyed form of `load_hashes`, as callers send them.
    """

    sequence_hashes: HashArray
    load_hashes: HashArray
    isl_tokens: int
    block_size: int
    public_hashes: HashArray

    def footprint(
        self,
        overlap_blocks: int,
        expected_output_tokens: int | None = None,
        expectation: ExpectedUsage | None = None,
    ) -> Footprint:
        """Return the load on a rank that has `overlap_blocks` of its blocks cached.

        An incomplete last block, and blocks without a hash, cannot be shared.
        """
        return Footprint(
            self.load_hashes,
            -(-self.isl_tokens // self.block_size) - len(self.load_hashes),
            self.isl_tokens,
            overlap_blocks * self.block_size,
            self.block_size,
            expected_output_tokens,
            expectation=expectation,
        )

    def prefill_tokens(self, overlap_blocks: int) -> int:
        """Return the tokens left to compute after `overlap_blocks` cached blocks."""
        return max(self.isl_tokens - overlap_blocks * self.block_size, 0)

    def cached_blocks(self, overlap_blocks: int, *, eagle: bool = False) -> int:
        """Return the blocks that the engine reuses of `overlap_blocks` cached blocks."""
        return reusable_blocks(self.isl_tokens, self.block_size, overlap_blocks, eagle=eagle)


class CallerHashes(Struct, frozen=True, eq=False):
    """The hashes of a prompt as its caller sent them, as u64.

    `block_hashes`: None if `sequence_hashes` also name the blocks in caches.
    """

    sequence_hashes: HashArray
    block_hashes: HashArray | None

    @classmethod
    def of(cls, request: PromptRequest) -> "CallerHashes | None":
        """Return the hashes of a request; None if it has none. O(hashes).

        Raises InvalidFieldError if one does not fit into 64 bits.
        """
        hashes, blocks = request.sequence_hashes, request.block_hashes
        if hashes is None:
            return None
        in_caches = None if blocks is None else hash_array("block_hashes", blocks)
        return cls(hash_array("sequence_hashes", hashes), in_caches)


class Prompt:
    """The tokens of a request, and their hashes for every identity requested so far.

    If only hashes are known, they hold for every identity with as many blocks for a prompt of this
    length; for other identities the prompt has no hashes. `by_identity`: the hashes so far.
    `caller_hashes`: None if it has tokens. `isl_tokens`: its length.
    `seed`: the seed of its local hashes. `stages`: the timer of the decision, if it is timed.
    """

    __slots__ = (
        "_about",
        "_found_by",
        "_is_plain",
        "_mm_infos",
        "_naming",
        "_tokens",
        "by_identity",
        "caller_hashes",
        "isl_tokens",
        "seed",
        "stages",
    )

    def __init__(
        self, request: PromptRequest, stages: Stages | None = None, naming: HashKeying = PLAIN
    ) -> None:
        """Hold a request's tokens or hashes.

        Raises InvalidFieldError if a hash of the caller does not fit into 64 bits.
        """
        self.stages = stages
        self._naming = naming
        self.caller_hashes: CallerHashes | None = None
        self._found_by = NO_HASHES
        tokens = request.token_ids
        if tokens is None:
            self._tokens, self.isl_tokens = NO_TOKENS, request.isl_tokens or 0
            self.caller_hashes = sent = CallerHashes.of(request)
            if sent is not None:
                blocks = sent.block_hashes
                self._found_by = sent.sequence_hashes if blocks is None else chain(blocks)
        else:
            self._tokens, self.isl_tokens = np.ascontiguousarray(tokens, np.uint32), len(tokens)
        self.seed = HASH_SEED
        if request.lora_name or request.cache_salt:
            self.seed = hash_seed(request.lora_name, request.cache_salt)
        self._mm_infos: Sequence[BlockMmInfo | None] = request.block_mm_infos or ()
        self.by_identity: dict[Identity, HashedPrompt] = {}
        self._about = None if naming.tracking is None else _model_of(request)
        has_keys = naming.key is not None or naming.tracking is not None
        is_special = has_keys or self._mm_infos or self.caller_hashes is not None
        self._is_plain = not is_special

    def laid_out(self, identity: Identity) -> tuple[HashedPrompt, TokenArray]:
        """Return the prompt under this identity, and the tokens that are not hashed yet.

        If there are some, the caller is to write their `sequence_hashes` with `seed`. O(1), or as
        `hashed` if the names of blocks are not these hashes, or if hashing is timed: its two steps
        are then two calls.
        """
        hashed = self.by_identity.get(identity)
        if hashed is not None:
            return hashed, NO_TOKENS
        if not self._is_plain:
            return self.hashed(identity), NO_TOKENS
        size, eagle, isl_tokens = identity.block_size, identity.eagle, self.isl_tokens
        hashes = np.empty(max(isl_tokens - eagle, 0) // size, np.uint64)
        hashed = HashedPrompt(hashes, hashes, isl_tokens, size, hashes)
        self.by_identity[identity] = hashed
        if self.stages is None:
            return hashed, self._tokens
        block_hashes(self._tokens, size, size + eagle, self.seed, hashes)
        self.stages.end(BLOCK_HASHING)
        chain_hashes(hashes, hashes)
        self.stages.end(SEQUENCE_HASHING)
        return hashed, NO_TOKENS

    def hashed(self, identity: Identity) -> HashedPrompt:
        """Return the prompt under this identity. O(tokens) at the first call, then O(1)."""
        known = self.by_identity.get(identity)
        if known is None:
            known = self.by_identity[identity] = self._hash(identity)
        return known

    def _hash(self, identity: Identity) -> HashedPrompt:
        if self.caller_hashes is not None:
            found_by, public = self._found_by, self.caller_hashes.sequence_hashes
            if len(public) != full_blocks(self.isl_tokens, identity):
                found_by = public = NO_HASHES
            found = self._naming.names(found_by)
            load = self._load_names(found, found_by, public, identity)
            return HashedPrompt(found, load, self.isl_tokens, identity.block_size, public)
        public = self._public_hashes(identity.block_size, identity.eagle)
        names = self._naming.names(public)
        load = self._load_names(names, public, public, identity)
        self.end(SEQUENCE_HASHING)
        return HashedPrompt(names, load, self.isl_tokens, identity.block_size, public)

    def _public_hashes(self, block_size: int, eagle: bool) -> HashArray:
        """Return the public hashes of the full blocks.

        The two steps run separately if each is timed, or if blocks include multimodal objects.
        """
        if self.stages is None and not self._mm_infos:
            return sequence_hashes(self._tokens, block_size, seed=self.seed, eagle=eagle)
        local_hashes = local_block_hashes(
            self._tokens,
            block_size,
            seed=self.seed,
            block_mm_infos=self._mm_infos,
            eagle=eagle,
        )
        self.end(BLOCK_HASHING)
        return chain(local_hashes)

    def _load_names(
        self, found: HashArray, found_by: HashArray, public: HashArray, identity: Identity
    ) -> HashArray:
        """Return the names in bookings: those in caches, if the hashes and keys are the same."""
        if self._about is None:
            return found if found_by is public else self._naming.names(public)
        return self._naming.load_names(public, self._about, identity)

    def end(self, stage: int) -> None:
        """End a stage of the decision, if it is timed."""
        if self.stages is not None:
            self.stages.end(stage)


def _model_of(request: PromptRequest) -> PromptRequest:
    """Return the fields that identify the prompt's owner, without its tokens.

    The tokens may be many, and a request may wait in the queue for long.
    """
    return PromptRequest(
        model_name=request.model_name,
        routing_group=request.routing_group,
        lora_name=request.lora_name,
        cache_salt=request.cache_salt,
    )


def prepare(
    request: PromptRequest,
    identities: Iterable[Identity],
    stages: Stages | None = None,
    naming: HashKeying = PLAIN,
) -> Prompt:
    """Hash a prompt under these identities, with names as on the bus.

    O(tokens); pure, so it may run on another thread.

    Raises InvalidFieldError if tokens are missing or too many, or if the hashes are invalid or fit
    no identity's block size.
    """
    if request.token_ids is not None:
        if len(request.token_ids) > MAX_PROMPT_TOKENS:
            check_length(request.tokens_field, len(request.token_ids))
    else:
        identities = list(identities)
        check_hashes(request, identities)
    prompt = Prompt(request, stages, naming)
    for identity in identities:
        prompt.hashed(identity)
    return prompt
