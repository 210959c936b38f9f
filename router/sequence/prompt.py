"""A prompt on its way through a decision: hashed once per identity that asks about it."""

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from router.protocol.requests import BlockMmInfo, PromptRequest
from router.protocol.values import HashArray, Identity, Scope
from router.sequence.expectation import Expectation
from router.sequence.footprint import Footprint, reusable_blocks
from router.sequence.hashing import (
    HASH_SEED,
    TokenArray,
    chain,
    hash_seed,
    local_block_hashes,
    sequence_hashes,
    token_array,
)
from router.sequence.known_hashes import (
    NO_HASHES,
    check_hashes,
    check_length,
    full_blocks,
    hash_array,
)
from router.sequence.naming import PLAIN, BlockNaming
from router.sequence.stages import BLOCK_HASHING, SEQUENCE_HASHING, Stages


class HashedPrompt(Struct, frozen=True):
    """A prompt as a rank with blocks of this size sees it.

    `sequence_hashes` name its full blocks in caches, `load_hashes` in bookings: the same, unless
    the caller has names of its own. `public_hashes`: those in bookings as callers say them, which
    are others where blocks are named under a key.
    """

    sequence_hashes: HashArray
    load_hashes: HashArray
    isl_tokens: int
    block_size: int
    public_hashes: HashArray

    @property
    def own_blocks(self) -> int:
        """Blocks that nobody can share: an incomplete last one, and any that have no name."""
        return -(-self.isl_tokens // self.block_size) - len(self.load_hashes)

    def footprint(
        self,
        overlap_blocks: int,
        expected_output_tokens: int | None = None,
        expectation: Expectation | None = None,
    ) -> Footprint:
        """What it weighs on a rank that has so many of its blocks cached."""
        return Footprint(
            self.load_hashes,
            self.own_blocks,
            self.isl_tokens,
            overlap_blocks * self.block_size,
            self.block_size,
            expected_output_tokens,
            expectation=expectation,
        )

    def prefill_tokens(self, overlap_blocks: int) -> int:
        """Tokens left to compute behind so many cached blocks."""
        return max(self.isl_tokens - overlap_blocks * self.block_size, 0)

    def cached_blocks(self, overlap_blocks: int, *, eagle: bool = False) -> int:
        """Blocks the engine will reuse of so many."""
        return reusable_blocks(self.isl_tokens, self.block_size, overlap_blocks, eagle=eagle)


class Prompt:
    """Tokens of a request, and their hashes for every identity asked about so far.

    Where only the hashes are known, they are those of every identity that has so many blocks for a
    prompt of this length, and others know nothing of it. `seed`: of its local hashes. `stages`:
    where the decision about it is timed, if it is.
    """

    __slots__ = (
        "_about",
        "_by_identity",
        "_isl_tokens",
        "_known",
        "_mm_infos",
        "_naming",
        "_tokens",
        "seed",
        "stages",
    )

    def __init__(
        self, request: PromptRequest, stages: Stages | None = None, naming: BlockNaming = PLAIN
    ) -> None:
        self.stages = stages
        self._naming = naming
        self._tokens = token_array(() if request.token_ids is None else request.token_ids)
        self._isl_tokens = len(self._tokens)
        self._known: tuple[HashArray, HashArray] | None = None
        if request.token_ids is None and request.sequence_hashes is not None:
            self._isl_tokens = request.isl_tokens or 0
            load_hashes = hash_array(request.sequence_hashes)
            blocks = request.block_hashes
            found_by = load_hashes if blocks is None else chain(hash_array(blocks))
            self._known = (found_by, load_hashes)
        self.seed = HASH_SEED
        if request.lora_name or request.cache_salt:
            self.seed = hash_seed(request.lora_name, request.cache_salt)
        self._mm_infos: Sequence[BlockMmInfo | None] = request.block_mm_infos or ()
        self._by_identity: dict[Identity, HashedPrompt] = {}
        self._about = None if naming.tracking is None else _whose(request)

    @property
    def isl_tokens(self) -> int:
        """Length of the prompt."""
        return self._isl_tokens

    @property
    def is_named_by_caller(self) -> bool:
        """Whether its caller hashed it."""
        return self._known is not None

    @property
    def unhashed(self) -> TokenArray | None:
        """Its tokens, contiguous, if its names are `sequence_hashes` of them by `seed` and nothing
        else, and nobody has asked for them yet.
        """
        if (
            self._by_identity
            or self._known is not None
            or self._mm_infos
            or not self._naming.is_plain
        ):
            return None
        return np.ascontiguousarray(self._tokens)

    def note_hashes(self, identity: Identity, hashes: HashArray) -> HashedPrompt:
        """Somebody else has hashed its `unhashed` tokens under this identity."""
        hashed = HashedPrompt(hashes, hashes, self._isl_tokens, identity.block_size, hashes)
        self._by_identity[identity] = hashed
        return hashed

    def hashed(self, identity: Identity) -> HashedPrompt:
        """The prompt under this identity. O(tokens) once, then O(1)."""
        known = self._by_identity.get(identity)
        if known is None:
            known = self._by_identity[identity] = self._hash(identity)
        return known

    def _hash(self, identity: Identity) -> HashedPrompt:
        if self._known is not None:
            fits = len(self._known[1]) == full_blocks(self.isl_tokens, identity)
            found_by, public = self._known if fits else (NO_HASHES, NO_HASHES)
            found = self._naming.names(found_by)
            load = self._load_names(found, found_by, public, identity)
            return HashedPrompt(found, load, self.isl_tokens, identity.block_size, public)
        public = self._public_hashes(identity.block_size, identity.eagle)
        names = self._naming.names(public)
        load = self._load_names(names, public, public, identity)
        self.end(SEQUENCE_HASHING)
        return HashedPrompt(names, load, self._isl_tokens, identity.block_size, public)

    def _public_hashes(self, block_size: int, eagle: bool) -> HashArray:
        """In two steps where each has to be timed, or where blocks are of more than tokens."""
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
        """Names in bookings: those in caches, unless they are of other hashes or under a key."""
        if self._about is None:
            return found if found_by is public else self._naming.names(public)
        return self._naming.load_names(public, self._about, identity)

    def end(self, stage: int) -> None:
        """A stage of the decision about it ended."""
        if self.stages is not None:
            self.stages.end(stage)


def expected(
    request: PromptRequest,
    scope: Scope,
    prompt: Prompt,
    found_by: HashArray,
    overlap_blocks: int,
    *,
    tenant: str | None = None,
) -> Expectation:
    """What is expected of a prompt where so many of its blocks are held; see `Expectation`."""
    return Expectation(
        scope,
        tenant,
        found_by,
        overlap_blocks,
        bool(request.cache_salt or request.lora_name),
        prompt.is_named_by_caller,
        bool(request.block_mm_infos),
    )


def _whose(request: PromptRequest) -> PromptRequest:
    """Without its tokens, which may be many in a long queue."""
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
    naming: BlockNaming = PLAIN,
) -> Prompt:
    """Hash a prompt under these identities, its blocks named as on the bus. O(tokens); pure, so it
    may run on another thread.

    Raises InvalidFieldError where there are no tokens, or too many, or hashes that are none, or
    are of no identity's blocks.
    """
    if request.token_ids is not None:
        check_length(request.tokens_field, len(request.token_ids))
    else:
        identities = list(identities)
        check_hashes(request, identities)
    prompt = Prompt(request, stages, naming)
    for identity in identities:
        prompt.hashed(identity)
    return prompt
